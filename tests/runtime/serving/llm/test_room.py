"""Room in a cache: in the order of arrival, and given back whatever happens."""

from __future__ import annotations

import asyncio

from springtide.runtime.serving.llm.room import TokenRoom


def test_streams_wait_for_room_in_their_order_and_one_that_leaves_gives_its_turn():
    async def scenario():
        room, began = TokenRoom(10), []
        gates = {name: asyncio.Event() for name in "abcd"}

        async def stream(name, num_tokens):
            async with room.taken(num_tokens):
                began.append(name)
                await gates[name].wait()

        tasks = {
            name: asyncio.create_task(stream(name, size)) for name, size in zip("abcd", (6, 6, 99, 2), strict=True)
        }
        await asyncio.sleep(0)
        assert began == ["a"], "b does not fit beside it, and the small d waits behind b and c"
        tasks["b"].cancel()
        await asyncio.sleep(0)
        gates["a"].set()
        await asyncio.sleep(0.01)
        assert began == ["a", "c"], "one that asks for more than there is gets all"
        gates["c"].set()
        gates["d"].set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert began == ["a", "c", "d"]
        async with asyncio.timeout(5), room.taken(10):
            pass

    asyncio.run(scenario())


def test_one_that_leaves_as_its_turn_comes_keeps_nothing():
    async def scenario():
        room = TokenRoom(10)

        async def stream():
            async with room.taken(10):
                pass

        async with room.taken(10):
            waiting = asyncio.create_task(stream())
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(5), room.taken(10):
            pass

    asyncio.run(scenario())
