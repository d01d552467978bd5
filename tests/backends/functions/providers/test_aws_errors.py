"""Errors of the cloud are one sentence, and say what to do where somebody can do something."""

import pytest
from botocore import exceptions

from springtide.backends.functions.providers.aws import LambdaSettings
from springtide.backends.functions.providers.aws_errors import Explained, code_of, sdk_errors
from springtide.core.errors import BackendError, InvalidRequest

SETTINGS = LambdaSettings(region="eu-central-1", role_arn="arn:aws:iam::123456789012:role/f", image_uri="r/i:1")


def client_error(code, message):
    return exceptions.ClientError({"Error": {"Code": code, "Message": message}}, "CreateFunction")


@pytest.mark.parametrize(
    ("code", "message", "sentence"),
    [
        ("InvalidParameterValueException", "The role defined cannot be assumed by Lambda.", "trust policy"),
        (
            "InvalidParameterValueException",
            "Source image r/i:1 does not exist.",
            "must be in ECR, in region eu-central-1",
        ),
        ("InvalidParameterValueException", "'MemorySize' value failed to satisfy", "smaller ones"),
        ("AccessDeniedException", "not authorized to perform lambda:CreateFunction", "may not do that"),
        ("ExpiredTokenException", "expired", "get new ones"),
    ],
)
def test_what_the_user_can_mend_is_said(code, message, sentence):
    with (
        pytest.raises(InvalidRequest, match=sentence) as raised,
        Explained("it cannot be made", SETTINGS, sdk_errors()),
    ):
        raise client_error(code, message)
    assert str(raised.value).startswith("it cannot be made: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        client_error("ServiceException", "internal"),
        exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:9"),
        exceptions.ReadTimeoutError(endpoint_url="http://127.0.0.1:9"),
        ConnectionResetError("reset"),
    ],
)
def test_the_rest_is_the_services_trouble(error):
    with pytest.raises(BackendError, match="it cannot be made"), Explained("it cannot be made", SETTINGS, sdk_errors()):
        raise error


def test_what_is_not_the_clouds_passes_through():
    with pytest.raises(ZeroDivisionError), Explained("it", SETTINGS, sdk_errors()):
        raise ZeroDivisionError


def test_the_code_of_an_answer():
    assert code_of(client_error("ThrottlingException", "slow down")) == "ThrottlingException"
    assert code_of(exceptions.ClientError({}, "Invoke")) == ""
