"""Checks whether an AWS account has what functions need, without creating anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from springtide.backends.functions.provider import AccountFinding, one_line
from springtide.backends.functions.providers.aws_errors import SdkErrors, code_of

_Ask = Callable[[Any, str, str], Any]
# Asked about a function that does not exist: the answer is "no such function" with the right, a refusal without it.
_ASKED: tuple[tuple[str, _Ask], ...] = (
    ("lambda:GetFunction", lambda client, name, image: client.get_function(FunctionName=name)),
    (
        "lambda:GetFunctionConfiguration",
        lambda client, name, image: client.get_function_configuration(FunctionName=name),
    ),
    (
        "lambda:UpdateFunctionCode",
        lambda client, name, image: client.update_function_code(FunctionName=name, ImageUri=image, DryRun=True),
    ),
    (
        "lambda:UpdateFunctionConfiguration",
        lambda client, name, image: client.update_function_configuration(FunctionName=name),
    ),
    ("lambda:InvokeFunction", lambda client, name, image: client.invoke(FunctionName=name, InvocationType="DryRun")),
)
# The right to create functions can only be tested by creating one.
_UNASKED = "lambda:CreateFunction and iam:PassRole"
_DOCUMENT = "docs/functions-providers.md says what they need"
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/"
    r"(?P<name>[a-z0-9._/-]+?)(:(?P<tag>[\w.-]+)|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# The prefix of functions' names before it contained the platform.
_NAMELESS = re.compile(r"springtide-\d+")
_MAX_TOLD = 3


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be examined: `client_of` gives a client of one of the cloud's services.

    `concurrency` is how many functions run at most, those included that warm up beside the others.
    """

    region: str
    role_arn: str
    image_uri: str
    prefix: str
    concurrency: int
    client_of: Callable[[str], Any]
    errors: SdkErrors


def examine_account(account: Account) -> list[AccountFinding]:
    """Make all checks that the keys' rights allow. Checks without the right are skipped or reported."""
    errors, where = account.errors, f"aws {account.region}"
    try:
        caller = str(account.client_of("sts").get_caller_identity()["Arn"])
    except errors.client as error:
        told = f"{where} does not take the keys ({code_of(error)})"
        return [AccountFinding(verdict="fail", text=told, mend=f"put keys that hold into the Secret: {_DOCUMENT}")]
    except errors.no_credentials:
        told = f"{where}: there are no keys to ask with"
        return [
            AccountFinding(
                verdict="warn", text=told, mend=f"put keys into the Secret, or give the pod a role: {_DOCUMENT}"
            )
        ]
    except errors.any as error:
        return [_unreachable(where, error)]
    seen = [AccountFinding(verdict="ok", text=f"{where} as {caller}")]
    looks: tuple[Callable[[Account, str], list[AccountFinding]], ...] = (_rights, _role, _image, _limits, _names)
    for look in looks:
        try:
            seen += look(account, caller)
        except errors.any as error:
            return [*seen, _unreachable(where, error)]
    return seen


def _unreachable(where: str, error: BaseException) -> AccountFinding:
    return AccountFinding(
        verdict="warn",
        text=f"{where} cannot be reached from here: {one_line(error)}",
        mend="ask from where it can be; whether the control plane reaches it, its log says",
    )


def _rights(account: Account, caller: str) -> list[AccountFinding]:
    """Check the rights to the calls that the platform makes, as far as they can be tested."""
    client, missing = account.client_of("lambda"), []
    # No function of that size exists.
    name = f"{account.prefix}-0"
    for action, ask in _ASKED:
        try:
            ask(client, name, account.image_uri)
        except account.errors.client as error:
            if code_of(error) in _DENIED:
                missing.append(action)
            elif code_of(error) != "ResourceNotFoundException":
                return [_puzzling("rights", error)]
    if missing:
        return [
            AccountFinding(
                verdict="fail", text=f"{caller} may not {', '.join(missing)}", mend=f"allow these: {_DOCUMENT}"
            )
        ]
    told = f"functions may be read, changed and invoked; whether {_UNASKED} are allowed shows at the first job"
    return [AccountFinding(verdict="ok", text=told)]


def _role(account: Account, caller: str) -> list[AccountFinding]:
    """Check that functions can assume their role."""
    arn, name = account.role_arn, account.role_arn.rpartition("/")[2]
    if arn.split(":")[4] != caller.split(":")[4]:
        told = f"the role {arn} is of another account than the keys ({caller.split(':')[4]})"
        return [AccountFinding(verdict="fail", text=told, mend="set functions.role to one of the same account")]
    try:
        role = account.client_of("iam").get_role(RoleName=name)["Role"]
    except account.errors.client as error:
        if code_of(error) in _DENIED:
            return []
        if code_of(error) != "NoSuchEntity":
            return [_puzzling("role", error)]
        return [AccountFinding(verdict="fail", text=f"there is no role {arn}", mend="make it, or set functions.role")]
    if "lambda.amazonaws.com" in json.dumps(role.get("AssumeRolePolicyDocument", {})):
        return [AccountFinding(verdict="ok", text=f"role {name}: functions may take it on")]
    told = f"Lambda cannot take on the role {name}"
    return [AccountFinding(verdict="fail", text=told, mend="let lambda.amazonaws.com assume it (its trust policy)")]


def _image(account: Account, caller: str) -> list[AccountFinding]:
    """Check that the functions' image is where Lambda looks for it."""
    found = _IMAGE.fullmatch(account.image_uri)
    if found is None:
        told = f"{account.image_uri} is no image of ECR, and Lambda takes no other"
        return [
            AccountFinding(verdict="fail", text=told, mend="push it to ECR in that region, and set functions.image")
        ]
    if found["region"] != account.region:
        told = f"{account.image_uri} is in {found['region']}, and functions run in {account.region}"
        return [
            AccountFinding(
                verdict="fail", text=told, mend=f"push it to ECR in {account.region}, and set functions.image"
            )
        ]
    which = {"imageDigest": found["digest"]} if found["digest"] else {"imageTag": found["tag"] or "latest"}
    try:
        account.client_of("ecr").describe_images(
            registryId=found["account"], repositoryName=found["name"], imageIds=[which]
        )
    except account.errors.client as error:
        if code_of(error) in _DENIED:
            return []
        if code_of(error) not in ("ImageNotFoundException", "RepositoryNotFoundException"):
            return [_puzzling("image", error)]
        mend = f"docker push {account.image_uri} (springtide package writes its recipe)"
        return [AccountFinding(verdict="fail", text=f"there is no image {account.image_uri}", mend=mend)]
    return [AccountFinding(verdict="ok", text=f"image {found['name']}:{found['tag'] or found['digest'] or 'latest'}")]


def _limits(account: Account, caller: str) -> list[AccountFinding]:
    """Check that as many functions may run at a time as jobs are planned with."""
    try:
        limit = int(account.client_of("lambda").get_account_settings()["AccountLimit"]["ConcurrentExecutions"])
    except account.errors.client:
        # The right to this call is not required.
        return []
    if limit >= account.concurrency:
        return []
    told = (
        f"the account runs {limit} functions at a time, and jobs may come to {account.concurrency}, those that warm up "
        "beside others included"
    )
    return [
        AccountFinding(
            verdict="warn", text=told, mend=f"set functions.concurrency: {max(1, limit // 2)}, or ask for more"
        )
    ]


def _names(account: Account, caller: str) -> list[AccountFinding]:
    """Which functions there are: the platform's own, and those that no platform of this version uses."""
    try:
        pages = account.client_of("lambda").get_paginator("list_functions").paginate()
        names = sorted(str(each["FunctionName"]) for page in pages for each in page["Functions"])
    except account.errors.client as error:
        mend = f"allow lambda:ListFunctions: {_DOCUMENT}"
        return [AccountFinding(verdict="fail", text=f"functions cannot be listed ({code_of(error)})", mend=mend)]
    own = [name for name in names if re.fullmatch(rf"{re.escape(account.prefix)}-\d+", name)]
    seen = [AccountFinding(verdict="ok", text=f"functions are called {account.prefix}-MEMORY; {len(own)} are made")]
    nameless = [name for name in names if _NAMELESS.fullmatch(name)]
    if nameless:
        told = f"{', '.join(nameless[:_MAX_TOLD])}{', ...' if len(nameless) > _MAX_TOLD else ''}"
        seen.append(
            AccountFinding(
                verdict="warn",
                text=f"{told}: made by an older version, and not used by this one",
                mend=f"when no platform of that version is left: aws lambda delete-function --region {account.region} "
                f"--function-name {nameless[0]}",
            )
        )
    return seen


def _puzzling(what: str, error: Any) -> AccountFinding:
    message = str(error.response.get("Error", {}).get("Message", ""))
    return AccountFinding(
        verdict="warn", text=f"the {what} cannot be seen: {code_of(error)}: {message}", mend="try again"
    )
