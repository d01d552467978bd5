"""Broken builds of how launches are found and counted, and the tests that must see it."""

BROKEN = (
    (
        "a launch before anything else",
        "native/src/launch.c",
        "        struct st_ticket ticket;                                                                                       \\\n        CUstream stream = config->hStream; ",
        "        struct st_ticket ticket;                                                                                       \\\n        CUstream stream = NULL; ",
        "tests/native/test_native_stub.py",
    ),
)
