"""What an account of AWS lacks for functions, told without making anything: answers of STS, IAM, ECR and Lambda."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from springtide.backends.functions.provider import AccountFinding
from springtide.backends.functions.providers.aws_check import Account, examine_account
from springtide.backends.functions.providers.aws_errors import sdk_errors

CALLER = "arn:aws:iam::123456789012:user/springtide"
ROLE = "arn:aws:iam::123456789012:role/springtide"
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/springtide:1"
PREFIX = "springtide-team-abc123"
# What is said to who may do it, of a function that is none.
NONE = ("ResourceNotFoundException", "no such function")
DENIED = ("AccessDeniedException", "no")
RIGHTS = (
    "get_function",
    "get_function_configuration",
    "update_function_code",
    "update_function_configuration",
    "invoke",
)
TRUST = '{"Statement": [{"Principal": {"Service": "lambda.amazonaws.com"}}]}'


class Cloud:
    """The services' clients with answers by operation; one that raises is a pair of code and message."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "sts.get_caller_identity": {"Arn": CALLER},
            **{f"lambda.{name}": NONE for name in RIGHTS},
            "iam.get_role": {"Role": role_of(TRUST)},
            "ecr.describe_images": {"imageDetails": []},
            "lambda.get_account_settings": {"AccountLimit": {"ConcurrentExecutions": 1000}},
            "lambda.list_functions": {"Functions": [{"FunctionName": f"{PREFIX}-2048"}, {"FunctionName": "other"}]},
            **{name.replace("__", "."): answer for name, answer in answers.items()},
        }

    def client_of(self, kind: str) -> Any:
        client = boto3.client(kind, region_name="eu-central-1", aws_access_key_id="test", aws_secret_access_key="test")
        stubber = Stubber(client)
        for name, answer in self.answers.items():
            service, _, operation = name.partition(".")
            if service != kind:
                continue
            if isinstance(answer, tuple):
                stubber.add_client_error(operation, answer[0], answer[1])
            else:
                stubber.add_response(operation, answer)
        stubber.activate()
        return _AnyOrder(client, stubber)


class _AnyOrder:
    """A client whose answers stand in a queue; what is asked of it in another order starts it anew."""

    def __init__(self, client: Any, stubber: Stubber) -> None:
        self._client = client
        self._stubber = stubber

    def __getattr__(self, name: str) -> Any:
        queue = self._stubber._queue  # type: ignore[attr-defined]
        wanted = {"get_paginator": "ListFunctions"}.get(name, "".join(part.title() for part in name.split("_")))
        while queue and queue[0]["operation_name"] != wanted:
            queue.popleft()
        return getattr(self._client, name)


def role_of(trust: str) -> dict[str, Any]:
    return {
        "Path": "/",
        "RoleName": "springtide",
        "RoleId": "AROA1234567890123456",
        "Arn": ROLE,
        "CreateDate": "2026-01-01T00:00:00Z",
        "AssumeRolePolicyDocument": trust,
    }


def examine(cloud: Cloud, **changes: Any) -> list[AccountFinding]:
    given: dict[str, Any] = {
        "region": "eu-central-1",
        "role_arn": ROLE,
        "image_uri": IMAGE,
        "prefix": PREFIX,
        "concurrency": 1000,
        "client_of": cloud.client_of,
        "errors": sdk_errors(),
    }
    return examine_account(Account(**{**given, **changes}))


def test_an_account_that_has_everything_is_told_so() -> None:
    seen = examine(Cloud())
    assert [each.verdict for each in seen] == ["ok"] * 5, seen
    assert [each.text for each in seen] == [
        f"aws eu-central-1 as {CALLER}",
        "functions may be read, changed and invoked; whether lambda:CreateFunction and iam:PassRole are allowed shows "
        "at the first job",
        "role springtide: functions may take it on",
        "image springtide:1",
        f"functions are called {PREFIX}-MEMORY; 1 are made",
    ]


@pytest.mark.parametrize(
    ("answers", "verdict", "sentence"),
    [
        ({"sts__get_caller_identity": ("InvalidClientTokenId", "no")}, "fail", "does not take the keys"),
        (
            {"lambda__update_function_code": DENIED, "lambda__invoke": DENIED},
            "fail",
            f"{CALLER} may not lambda:UpdateFunctionCode, lambda:InvokeFunction",
        ),
        ({"lambda__invoke": ("ServiceException", "ill")}, "warn", "the rights cannot be seen: ServiceException: ill"),
        ({"iam__get_role": ("NoSuchEntity", "no")}, "fail", f"there is no role {ROLE}"),
        ({"iam__get_role": {"Role": role_of("{}")}}, "fail", "Lambda cannot take on the role springtide"),
        ({"iam__get_role": ("ServiceFailure", "ill")}, "warn", "the role cannot be seen: ServiceFailure: ill"),
        ({"ecr__describe_images": ("ImageNotFoundException", "no")}, "fail", f"there is no image {IMAGE}"),
        ({"ecr__describe_images": ("RepositoryNotFoundException", "no")}, "fail", f"there is no image {IMAGE}"),
        (
            {"lambda__get_account_settings": {"AccountLimit": {"ConcurrentExecutions": 10}}},
            "warn",
            "the account runs 10 functions at a time, and jobs may come to 1000",
        ),
        ({"lambda__list_functions": ("AccessDeniedException", "no")}, "fail", "functions cannot be listed"),
        (
            {"lambda__list_functions": {"Functions": [{"FunctionName": "springtide-512"}]}},
            "warn",
            "springtide-512: made by an older version",
        ),
    ],
)
def test_each_thing_that_is_missing_is_told_with_its_mend(answers: dict[str, Any], verdict: str, sentence: str) -> None:
    wrong = [each for each in examine(Cloud(**answers)) if each.verdict != "ok"]
    assert [each.verdict for each in wrong] == [verdict], wrong
    assert sentence in wrong[0].text
    assert wrong[0].mend


def test_what_may_not_be_looked_at_is_left_out() -> None:
    denied = ("AccessDenied", "no")
    seen = examine(Cloud(iam__get_role=denied, ecr__describe_images=denied, lambda__get_account_settings=denied))
    assert [each.verdict for each in seen] == ["ok"] * 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"role_arn": ROLE.replace("1234", "9999")}, "is of another account than the keys (123456789012)"),
        ({"image_uri": "docker.io/springtide:1"}, "is no image of ECR"),
        ({"image_uri": IMAGE.replace("eu-central-1", "us-east-1")}, "is in us-east-1, and functions run in"),
    ],
)
def test_settings_that_do_not_go_together_are_faults(changes: dict[str, Any], sentence: str) -> None:
    wrong = [each for each in examine(Cloud(), **changes) if each.verdict != "ok"]
    assert [each.verdict for each in wrong] == ["fail"]
    assert sentence in wrong[0].text


def test_a_cloud_that_does_not_answer_is_a_warning() -> None:
    def client_of(kind: str) -> Any:
        return boto3.client(
            kind,
            region_name="eu-central-1",
            endpoint_url="http://127.0.0.1:1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    cloud = Cloud()
    (seen,) = examine(cloud, client_of=client_of)
    assert seen.verdict == "warn"
    assert "cannot be reached from here" in seen.text
