"""A handler that does as it is told: what the provider's and the emulator's tests run."""

import os
import subprocess
import sys
import time


def handler(event, context):
    """`do` says what; the answer tells where it ran."""
    verb = event.get("do", "echo")
    print(f"doing {verb}")
    if verb == "raise":
        raise ValueError(event["text"])
    if verb == "exit":
        os._exit(event["code"])
    if verb == "sleep":
        time.sleep(event["seconds"])
    if verb == "hold":
        held = bytearray(event["mb"] << 20)
        held[::4096] = b"\x01" * len(held[::4096])
        time.sleep(event.get("seconds", 0))
    if verb == "spin":
        end = time.monotonic() + event["seconds"]
        before = time.process_time()
        while time.monotonic() < end:
            pass
        return {"cpu_s": time.process_time() - before, "wall_s": event["seconds"]}
    if verb == "child":
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=event.get("daemon", False)
        )
        return {"pid": child.pid}
    return {
        "echo": event,
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "request_id": context.aws_request_id,
        "left_ms": context.get_remaining_time_in_millis(),
        "memory_mb": context.memory_limit_in_mb,
    }
