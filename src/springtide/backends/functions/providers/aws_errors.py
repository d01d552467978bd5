"""Turns boto3's errors into one sentence each, with the fix where there is one."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from springtide.backends.functions.provider import one_line
from springtide.core.errors import BackendError, InvalidRequest

INSTALL = "pip install 'springtide[functions]'"


class Deployment(Protocol):
    """The settings that the sentences name."""

    @property
    def region(self) -> str:
        """The region's name."""
        ...

    @property
    def role_arn(self) -> str:
        """The role of the functions."""
        ...

    @property
    def image_uri(self) -> str:
        """The functions' container image."""
        ...

    @property
    def endpoint_url(self) -> str:
        """The address of the API; empty for AWS."""
        ...


class SdkErrors(msgspec.Struct, frozen=True):
    """The SDK's error classes, loaded late so that this module can be imported without it."""

    client: type[Exception]
    no_credentials: tuple[type[Exception], ...]
    never_sent: tuple[type[Exception], ...]
    any: tuple[type[Exception], ...]


def sdk_errors() -> SdkErrors:
    """The classes. Raises InvalidRequest without boto3."""
    try:
        from botocore import exceptions
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise InvalidRequest(f"AWS Lambda needs boto3; {INSTALL}") from None
    credentials = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
    never_sent = (
        *credentials,
        exceptions.EndpointConnectionError,
        exceptions.ConnectTimeoutError,
        exceptions.ParamValidationError,
    )
    return SdkErrors(exceptions.ClientError, credentials, never_sent, (exceptions.BotoCoreError, HTTPError, OSError))


class Explained:
    """Turns what the SDK raises into one sentence: InvalidRequest with a mend where there is one, else BackendError."""

    def __init__(self, what: str, deployment: Deployment, errors: SdkErrors) -> None:
        self._what = what
        self._deployment = deployment
        self._errors = errors

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Convert errors of the SDK."""
        errors = self._errors
        if isinstance(error, errors.no_credentials):
            raise InvalidRequest(
                f"{self._what}: no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "run `aws configure`"
            ) from error
        if isinstance(error, errors.client):
            raise self._told(error) from error
        if isinstance(error, errors.never_sent):
            region = self._deployment.region
            where = self._deployment.endpoint_url or f"region {region}"
            raise BackendError(f"{self._what}: Lambda cannot be reached ({where}): {one_line(error)}") from error
        if isinstance(error, errors.any):
            raise BackendError(f"{self._what}: {one_line(error)}") from error

    def _told(self, error: Any) -> BackendError | InvalidRequest:
        code, message = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
        deployment = self._deployment
        mends = {
            "UnrecognizedClientException": "the access key is not known there; check the credentials and the region",
            "InvalidSignatureException": "the secret key does not belong to the access key, or the clock is wrong",
            "ExpiredTokenException": "the credentials have expired; get new ones",
            "AccessDeniedException": "these credentials may not do that; see docs/functions-providers.md",
            "CodeStorageExceededException": "the account's code storage is full; delete old functions",
        }
        lowered = message.lower()
        if code == "InvalidParameterValueException" and "role" in lowered:
            mend = (
                f"Lambda cannot take on the role {deployment.role_arn}; its trust policy must name lambda.amazonaws.com"
            )
        elif code == "InvalidParameterValueException" and "image" in lowered:
            mend = (
                f"Lambda cannot use the image {deployment.image_uri}; it must be in ECR, in region {deployment.region}"
            )
        elif code == "InvalidParameterValueException" and "memory" in lowered:
            mend = "this account has no functions of that size; ask AWS for more, or plan with smaller ones"
        elif code in mends:
            mend = mends[code]
        else:
            return BackendError(f"{self._what}: {code}: {message}")
        return InvalidRequest(f"{self._what}: {mend} ({code}: {message})")


def code_of(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
