"""The cache beside a store in memory: what it believes, what it refuses, what it finds by comparing."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from springtide.backends.kubernetes.client import cache as cache_module
from springtide.backends.kubernetes.client.cache import Cache, ObjectChange, trim_metadata
from springtide.backends.kubernetes.client.errors import Expired, KubeForbidden, ServerFault, Unreachable
from springtide.backends.kubernetes.client.kinds import CONFIG_MAP, Key
from springtide.backends.kubernetes.client.messages import Heads, Listing, WatchEvent, decode_heads


class Store:
    """Objects with versions, and everything that ever happened to them."""

    def __init__(self) -> None:
        self.version = 10
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, WatchEvent]] = []
        self.lists = 0
        self.frozen: Listing | None = None
        self.trouble: list[Exception] = []
        self.loses = False
        self.watched_from: list[str] = []
        self._changed = asyncio.Event()

    def put(self, name: str, value: str, namespace: str = "ns") -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        known = self.objects.get(name, {"metadata": {"uid": f"u{self.version}"}})
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": known["metadata"]["uid"],
            "resourceVersion": str(self.version),
            "managedFields": [{"manager": "somebody"}],
        }
        self.objects[name] = {"metadata": metadata, "value": value}
        self._happen(kind, self.objects[name])

    def delete(self, name: str) -> None:
        self.version += 1
        obj = self.objects.pop(name)
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._happen("DELETED", obj)

    def end_watches(self, error: Exception | None = None) -> None:
        self.events.append((0, WatchEvent("END", {"error": error})))
        self._wake()

    def bookmark(self) -> None:
        self.version += 1
        self._happen("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def _happen(self, kind: str, obj: dict[str, Any]) -> None:
        if not self.loses:
            self.events.append((self.version, WatchEvent(kind, copy.deepcopy(obj))))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- as an API server --------------------------------------------------------------------------------------------

    async def list(self, kind: object, namespace: str = "", **options: Any) -> Listing:
        listing = await self._listed(**options)
        self.lists += 1
        return listing

    async def heads(self, kind: object, namespace: str = "", **options: Any) -> Heads:
        listing = await self._listed(**options)
        page = {"metadata": {"resourceVersion": listing.resource_version}, "items": listing.items}
        return Heads(decode_heads(msgspec.json.encode(page)).items or [], listing.resource_version)

    async def _listed(self, **options: Any) -> Listing:
        await asyncio.sleep(0)
        if self.trouble:
            raise self.trouble.pop(0)
        if int(options.get("not_older_than") or 0) > self.version:
            raise ServerFault(504, "Timeout", f"Timeout: Too large resource version: {options['not_older_than']}")
        if self.frozen is not None:
            return Listing(copy.deepcopy(self.frozen.items), self.frozen.resource_version)
        return self.snapshot()

    def snapshot(self) -> Listing:
        return Listing(copy.deepcopy(list(self.objects.values())), str(self.version))

    async def find(self, kind: object, name: str, namespace: str = "") -> dict[str, Any] | None:
        await asyncio.sleep(0)
        return copy.deepcopy(self.objects.get(name))

    async def watch(
        self, kind: object, namespace: str, *, resource_version: str, on_open: Callable[[], None], **_: Any
    ) -> AsyncIterator[WatchEvent]:
        self.watched_from.append(resource_version)
        position = len(self.events)
        earlier = [event for version, event in self.events if version > int(resource_version)]
        on_open()
        for event in earlier:
            yield copy.deepcopy(event)
        while True:
            for _version, event in self.events[position:]:
                position += 1
                if event.type == "END":
                    if event.object["error"] is not None:
                        raise event.object["error"]
                    return
                yield copy.deepcopy(event)
            changed = self._changed
            if position >= len(self.events):
                # Of a past that was wiped out nothing more comes.
                position = len(self.events)
                await changed.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(cache_module, "_COMPARE_PART", 1.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def values(cache: Cache) -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["value"] for obj in cache.objects()}


def run(story: Callable[[Store, Cache], Any], **options: Any) -> None:
    async def live() -> None:
        store = Store()
        cache = Cache(CONFIG_MAP, namespaces=["ns"], **{"compare_every_s": 1000.0, **options})
        store.put("a", "0")
        task = asyncio.ensure_future(cache.run(store))  # type: ignore[arg-type]
        await until(lambda: cache.is_synced)
        try:
            await story(store, cache)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(live())


def test_listeners_hear_what_was_what_is_and_what_there_was_before_them() -> None:
    async def story(store: Store, cache: Cache) -> None:
        heard: list[ObjectChange] = []
        cache.listen(heard.append)
        store.put("a", "1")
        store.delete("a")
        await until(lambda: len(heard) == 3)
        assert [(change.before and change.before["value"], change.now and change.now["value"]) for change in heard] == [
            (None, "0"),
            ("0", "1"),
            ("1", None),
        ]
        assert heard[0].key == Key("ns", "a")
        assert "managedFields" not in heard[0].now["metadata"]

    run(story)


@pytest.mark.parametrize("error", [None, Unreachable("cut"), Expired(410, "Expired", "too old")])
def test_a_watch_that_ends_goes_on(error: Exception | None) -> None:
    async def story(store: Store, cache: Cache) -> None:
        store.end_watches(error)
        store.put("a", "1")
        store.put("b", "2")
        await until(lambda: values(cache) == {"a": "1", "b": "2"})
        # A comparison may have brought both before the watch is up again.
        await until(lambda: len(store.watched_from) == 2 and cache.problem == "")
        assert store.lists == (2 if isinstance(error, Expired) else 1)

    run(story)


def test_it_goes_on_from_the_last_bookmark() -> None:
    async def story(store: Store, cache: Cache) -> None:
        heard: list[ObjectChange] = []
        store.put("a", "1")
        await until(lambda: values(cache) == {"a": "1"})
        cache.listen(heard.append)
        heard.clear()
        store.bookmark()
        await asyncio.sleep(0.01)
        store.end_watches()
        store.put("a", "2")
        await until(lambda: values(cache) == {"a": "2"})
        await until(lambda: len(store.watched_from) == 2)
        assert len(heard) == 1
        assert store.watched_from == ["11", "13"]

    run(story)


def test_the_past_is_refused_until_it_lasts(monkeypatch) -> None:
    async def story(store: Store, cache: Cache) -> None:
        past = store.snapshot()
        store.put("a", "1")
        store.put("b", "2")
        await until(lambda: values(cache) == {"a": "1", "b": "2"})
        store.frozen = past
        store.end_watches(Expired(410, "Expired", "too old"))
        await until(lambda: "held before" in cache.problem)
        await asyncio.sleep(0.05)
        assert values(cache) == {"a": "1", "b": "2"}
        # The store was restored from a backup, and this is what there is.
        store.events.clear()
        monkeypatch.setattr(cache_module, "PAST_REFUSED_S", 0.0)
        await until(lambda: values(cache) == {"a": "0"})

    run(story)


@pytest.mark.parametrize("lasts_s", [0.05, 1000.0])
def test_a_store_that_is_restored_from_a_backup_while_a_watch_stands(monkeypatch, lasts_s: float) -> None:
    """The watch is of a version that the server will reach in a week: it never ends, and never says a word."""
    monkeypatch.setattr(cache_module, "PAST_REFUSED_S", lasts_s)

    async def story(store: Store, cache: Cache) -> None:
        store.put("a", "1")
        await until(lambda: values(cache) == {"a": "1"})
        store.loses = True
        store.delete("a")
        store.put("b", "restored")
        store.objects["b"]["metadata"]["resourceVersion"] = "4"
        store.version = 5
        store.events.clear()
        if lasts_s > 1:
            await asyncio.sleep(0.2)
            assert values(cache) == {"a": "1"}
            return
        await until(lambda: values(cache) == {"b": "restored"})
        store.loses = False
        store.put("c", "new")
        await until(lambda: values(cache) == {"b": "restored", "c": "new"})

    run(story, compare_every_s=0.02)


def test_what_nobody_told_of_is_found() -> None:
    async def story(store: Store, cache: Cache) -> None:
        store.put("b", "2")
        await until(lambda: values(cache) == {"a": "0", "b": "2"})
        store.loses = True
        store.put("a", "1")
        store.delete("b")
        store.put("c", "3")
        await until(lambda: values(cache) == {"a": "1", "c": "3"})
        assert cache.num_healed == 3
        assert store.lists == 1

    run(story, compare_every_s=0.02)


def test_news_that_a_comparison_has_overtaken_does_not_count() -> None:
    """The object is gone by the listing; then the older change of it arrives at last."""

    async def story(store: Store, cache: Cache) -> None:
        store.loses = True
        store.put("a", "late")
        late = copy.deepcopy(store.objects["a"])
        version = store.version
        store.delete("a")
        await until(lambda: values(cache) == {})
        store.loses = False
        store.events.append((version, WatchEvent("MODIFIED", late)))
        store.put("b", "2")
        await until(lambda: "b" in values(cache))
        assert values(cache) == {"b": "2"}

    run(story, compare_every_s=0.02)


def test_an_older_state_does_not_replace_a_later_one() -> None:
    async def story(store: Store, cache: Cache) -> None:
        before = copy.deepcopy(store.objects["a"])
        store.put("a", "1")
        await until(lambda: values(cache) == {"a": "1"})
        assert cache.put(before)["value"] == "1"
        cache.drop(Key("ns", "a"), before)
        assert values(cache) == {"a": "1"}

    run(story)


def test_an_absence_is_confirmed() -> None:
    async def story(store: Store, cache: Cache) -> None:
        store.loses = True
        store.put("b", "2")
        found = await cache.confirm(store, "b", "ns")  # type: ignore[arg-type]
        assert found is not None
        assert values(cache) == {"a": "0", "b": "2"}
        store.delete("b")
        assert await cache.confirm(store, "b", "ns") is None  # type: ignore[arg-type]
        assert values(cache) == {"a": "0"}

    run(story)


def test_what_it_may_not_see_is_said_and_asked_again() -> None:
    async def story(store: Store, cache: Cache) -> None:
        store.trouble = [KubeForbidden(403, "Forbidden", "you may not list")] * 3
        store.end_watches(Expired(410, "Expired", "too old"))
        await until(lambda: cache.problem == "you may not list")
        await until(lambda: cache.problem == "")

    run(story)


def test_a_mistake_of_a_listener_or_a_trim_ends_nothing() -> None:
    def trim(obj: dict[str, Any]) -> dict[str, Any]:
        if obj.get("value") == "bad":
            raise ZeroDivisionError("a mistake")
        return trim_metadata(obj)

    async def story(store: Store, cache: Cache) -> None:
        def fails(change: ObjectChange) -> None:
            raise ZeroDivisionError("a mistake")

        cache._listeners.append(fails)
        store.put("b", "bad")
        await until(lambda: "mistake" in cache.problem)
        store.put("b", "good")
        await until(lambda: values(cache) == {"a": "0", "b": "good"})

    run(story, trim=trim)
