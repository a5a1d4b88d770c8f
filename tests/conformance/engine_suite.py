"""What every engine must do with new weights. A test class inherits `EngineSuite` and says how to make its engine, and what it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from mooncake_ray.engines import EngineAdapter, get_engine
from mooncake_ray.errors import (
    ConfigError,
    EnginePausedError,
    EnginePoisonedError,
    PlanError,
    StaleVersionError,
    SyncTimeoutError,
    WeightSyncError,
)
from mooncake_ray.weights.placement import Placement

TIMEOUT_S = 150.0


class BrokenOnPurpose(Exception):
    pass


def pieces(engine: EngineAdapter, whole: dict[str, torch.Tensor], numbers=None):
    """Each fragment's content, cut from whole tensors."""
    p = Placement.of("e", engine.shard().fragments())
    for i in range(len(p)) if numbers is None else numbers:
        tensor = whole[p.metas[p.tensor[i]].name]
        d = tensor.dim()
        index = tuple(slice(a, b) for a, b in zip(p.lo[i].tolist()[-d:], p.hi[i].tolist()[-d:], strict=True)) if d else ()
        yield i, tensor[index]


def spoil(targets) -> None:
    targets[0].zero_()


class EngineSuite:
    """Inherit, set `name`, and say the rest."""

    name: ClassVar[str]

    def make(self) -> EngineAdapter:
        """An engine that serves version 1, which is `whole(1)`."""
        raise NotImplementedError

    def whole(self, version: int) -> dict[str, torch.Tensor]:
        """All tensors of the model in that version, by canonical name."""
        raise NotImplementedError

    def answer(self, engine: EngineAdapter) -> Any:
        """Something the engine computes, to compare with ==."""
        raise NotImplementedError

    def expected(self, version: int) -> Any:
        """That, of an unsharded model that never was updated."""
        raise NotImplementedError

    def generate(self, engine: Any, tokens: int) -> Any:
        """A `Generation` of so many tokens."""
        return engine.generate([1, 2, 3], tokens)

    def before_each_token(self, engine: Any, call: Callable[[], None]) -> Callable[[], None]:
        """Has the engine call that before it computes, in the thread that does, for each token. Returns what ends it."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self):
        engine = self.make()
        engine.init_weight_transfer_engine({})
        return engine

    def update(self, engine, version: int, **how: Any) -> None:
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        engine.update_weights(how or {"pieces": pieces(engine, self.whole(version))})
        engine.finish_weight_update(version)
        engine.resume()

    def expect(self, engine, version: int) -> None:
        assert engine.weight_version == version and not engine.poisoned
        assert self.answer(engine) == self.expected(version)

    def poison(self, engine) -> None:
        """Breaks an update in the middle."""

        def half():
            whole = list(pieces(engine, self.whole(7)))
            yield from whole[: len(whole) // 2]
            raise BrokenOnPurpose("the link is gone")

        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        with pytest.raises(BrokenOnPurpose):
            engine.update_weights({"pieces": half()})
        engine.resume()

    def test_is_an_engine(self, engine):
        assert isinstance(engine, EngineAdapter)
        assert engine.name == self.name and isinstance(engine, get_engine(self.name))
        assert self.expected(1) != self.expected(2), "a suite whose versions answer the same proves nothing"

    def test_exact_weights(self, engine):
        self.expect(engine, 1)
        for version in (2, 5, 6):
            self.update(engine, version)
            self.expect(engine, version)

    def test_written_in_calls_of_any_size_and_order(self, engine):
        numbers = [i for i, _ in pieces(engine, self.whole(2))]
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        for i in reversed(numbers):
            engine.update_weights({"pieces": pieces(engine, self.whole(2), [i])})
        engine.finish_weight_update(2)
        engine.resume()
        self.expect(engine, 2)

    def test_applied_in_place(self, engine):
        def apply(targets):
            for i, piece in pieces(engine, self.whole(2)):
                targets[i].copy_(piece.view(targets[i].shape))

        self.update(engine, 2, apply=apply)
        self.expect(engine, 2)

    def test_memory_stays(self, engine):
        before = {n: t.data_ptr() for n, t in engine.shard().buffers().items()}
        fragments = list(engine.shard().fragments())
        self.update(engine, 2)
        assert {n: t.data_ptr() for n, t in engine.shard().buffers().items()} == before
        assert list(engine.shard().fragments()) == fragments

    def test_versions_only_grow(self, engine):
        self.update(engine, 4)
        for stale in (4, 3, 0):
            engine.start_weight_update()
            with pytest.raises(StaleVersionError, match=f"{stale} comes after version 4"):
                engine.finish_weight_update(stale)
            engine.abort_weight_update()
        self.expect(engine, 4)

    def test_a_version_is_an_integer(self, engine):
        engine.start_weight_update()
        for odd in ("2", 2.0, True, None):
            with pytest.raises(WeightSyncError, match="integer"):
                engine.finish_weight_update(odd)
        engine.abort_weight_update()

    def test_a_version_is_visible_when_it_is_finished(self, engine):
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        engine.update_weights({"pieces": pieces(engine, self.whole(2))})
        assert engine.weight_version == 1
        with pytest.raises(WeightSyncError, match="finish it or abort it"):
            engine.resume()
        engine.finish_weight_update(2)
        assert engine.weight_version == 2
        engine.resume()
        self.expect(engine, 2)

    def test_an_abort_before_the_first_write_changes_nothing(self, engine):
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        engine.abort_weight_update()
        engine.resume()
        self.expect(engine, 1)
        engine.abort_weight_update()  # nothing to abort

    def test_what_fails_before_the_first_write_changes_nothing(self, engine):
        def broken(*_):
            raise BrokenOnPurpose("no patch")
            yield

        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        for info in ({"pieces": broken()}, {"apply": lambda targets: next(broken())}):
            with pytest.raises(BrokenOnPurpose):
                engine.update_weights(info)
        engine.update_weights({"pieces": pieces(engine, self.whole(2))})
        engine.finish_weight_update(2)
        engine.resume()
        self.expect(engine, 2)

    def test_pieces_must_fit(self, engine):
        i, piece = next(pieces(engine, self.whole(2)))
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        for wrong in (piece.double(), torch.cat([piece, piece]), piece.flatten()[:1]):
            with pytest.raises(PlanError, match="no content of fragment"):
                engine.update_weights({"pieces": [(i, wrong)]})
        for number in (-1, 10**6):
            with pytest.raises(PlanError, match="no fragment"):
                engine.update_weights({"pieces": [(number, piece)]})
        engine.abort_weight_update()
        engine.resume()
        self.expect(engine, 1)

    def test_the_order_of_calls(self, engine):
        with pytest.raises(WeightSyncError, match="no update is open"):
            engine.update_weights({"pieces": []})
        with pytest.raises(WeightSyncError, match="no update is open"):
            engine.finish_weight_update(2)
        engine.start_weight_update()
        with pytest.raises(WeightSyncError, match="open already"):
            engine.start_weight_update()
        with pytest.raises(WeightSyncError, match="paused"):
            engine.update_weights({"pieces": pieces(engine, self.whole(2))})
        engine.pause(timeout_s=TIMEOUT_S)
        for info in ({}, {"weights": []}, {"pieces": [], "apply": lambda targets: None}):
            with pytest.raises(WeightSyncError, match="one of pieces and apply"):
                engine.update_weights(info)
        engine.abort_weight_update()
        engine.resume()
        self.expect(engine, 1)

    def test_a_failure_in_the_middle_poisons(self, engine):
        self.poison(engine)
        assert "link is gone" in engine.poisoned and engine.weight_version is None
        with pytest.raises(EnginePoisonedError, match="link is gone"):
            self.answer(engine)
        with pytest.raises(EnginePoisonedError):
            self.generate(engine, 3)

    def test_an_abort_after_the_first_write_poisons(self, engine):
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        engine.update_weights({"apply": spoil})
        engine.abort_weight_update()
        engine.resume()
        with pytest.raises(EnginePoisonedError, match="aborted"):
            self.answer(engine)

    def test_a_whole_restore_heals(self, engine):
        self.update(engine, 3)
        self.poison(engine)
        self.update(engine, 3)  # of the version it had, or of a newer one
        self.expect(engine, 3)
        self.poison(engine)
        self.update(engine, 4)
        self.expect(engine, 4)

    def test_half_a_restore_does_not(self, engine):
        def restore_first(targets):
            targets[0].copy_(whole[0][1].view(targets[0].shape))
            return [0]

        self.poison(engine)
        whole = list(pieces(engine, self.whole(2)))
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        engine.update_weights({"pieces": whole[1:]})
        engine.update_weights({"apply": spoil})  # a patch, whatever it is upon
        with pytest.raises(WeightSyncError, match="written anew"):
            engine.finish_weight_update(2)
        assert engine.poisoned
        engine.update_weights({"apply": restore_first})
        engine.finish_weight_update(2)
        engine.resume()
        self.expect(engine, 2)

    def test_a_restore_that_is_broken_off_leaves_it_poisoned(self, engine):
        self.poison(engine)
        self.poison(engine)
        with pytest.raises(EnginePoisonedError):
            self.answer(engine)
        self.update(engine, 2)
        self.expect(engine, 2)

    def test_a_poisoned_engine_gets_no_older_version(self, engine):
        self.update(engine, 3)
        self.poison(engine)
        engine.start_weight_update()
        engine.pause(timeout_s=TIMEOUT_S)
        engine.update_weights({"pieces": pieces(engine, self.whole(2))})
        with pytest.raises(StaleVersionError, match="2 comes after version 3"):
            engine.finish_weight_update(2)
        engine.abort_weight_update()
        engine.resume()
        assert engine.poisoned

    @pytest.mark.parametrize("mode", ["abort", "wait"])
    def test_a_pause_refuses_new_requests(self, engine, mode):
        engine.pause(mode, timeout_s=TIMEOUT_S)
        engine.pause(mode, timeout_s=TIMEOUT_S)
        for ask in (self.answer, lambda e: self.generate(e, 2)):
            with pytest.raises(EnginePausedError, match=mode):
                ask(engine)
        engine.resume()
        engine.resume()
        self.expect(engine, 1)

    def test_a_pause_freezes_new_requests(self, engine):
        engine.pause("keep", timeout_s=TIMEOUT_S)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.answer, engine)
            engine.start_weight_update()
            engine.update_weights({"pieces": pieces(engine, self.whole(2))})
            engine.finish_weight_update(2)
            assert not asked.done()
            engine.resume()
            assert asked.result(TIMEOUT_S) == self.expected(2)

    def test_there_are_three_modes(self, engine):
        with pytest.raises(ConfigError, match="abort, wait, keep"):
            engine.pause("retract")
        self.expect(engine, 1)

    def started(self, engine, tokens: int):
        """A generation that runs in a thread, and has made a token: (its future, something that lets the rest be made)."""
        at, go = threading.Event(), threading.Event()

        def between() -> None:
            at.set()
            assert go.wait(TIMEOUT_S)

        end = self.before_each_token(engine, between)
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self.generate, engine, tokens)
        assert at.wait(TIMEOUT_S)

        def release() -> None:
            end()
            go.set()

        pool.shutdown(wait=False)
        return future, release

    def test_a_pause_waits_for_what_computes(self, engine):
        future, release = self.started(engine, 2)
        for mode in ("keep", "wait"):
            with pytest.raises(SyncTimeoutError, match="1 requests are running"):
                engine.pause(mode, timeout_s=0.01)
        release()
        assert future.result(TIMEOUT_S).finish_reason == "length"
        self.expect(engine, 1)

    def test_keep_splits_an_answer_between_two_tokens(self, engine):
        future, release = self.started(engine, 40)
        with ThreadPoolExecutor(1) as pool:
            engine.start_weight_update()
            paused = pool.submit(engine.pause, "keep", timeout_s=TIMEOUT_S)
            self.wait_for_pause(engine)
            release()
            paused.result(TIMEOUT_S)
        engine.update_weights({"pieces": pieces(engine, self.whole(2))})
        engine.finish_weight_update(2)
        engine.resume()
        made = future.result(TIMEOUT_S)
        assert [(s.version, s.start, s.end) for s in made.weight_versions] == [(1, 0, 1), (2, 1, 40)]
        assert len(made.tokens) == 40

    def test_wait_lets_an_answer_end(self, engine):
        calls = []
        self.before_each_token(engine, lambda: calls.append(1))
        future, release = self.started(engine, 5)
        with ThreadPoolExecutor(1) as pool:
            paused = pool.submit(engine.pause, "wait", timeout_s=TIMEOUT_S)
            self.wait_for_pause(engine)
            with pytest.raises(EnginePausedError):
                self.answer(engine)
            release()
            paused.result(TIMEOUT_S)
            assert len(calls) == 5, "the pause begins when the answer has ended"
        made = future.result(TIMEOUT_S)
        assert len(made.tokens) == 5 and made.finish_reason == "length"
        engine.resume()

    def test_abort_ends_an_answer(self, engine):
        future, release = self.started(engine, 5)
        with ThreadPoolExecutor(1) as pool:
            paused = pool.submit(engine.pause, "abort", timeout_s=TIMEOUT_S)
            self.wait_for_pause(engine)
            release()
            paused.result(TIMEOUT_S)
        made = future.result(TIMEOUT_S)
        assert made.finish_reason == "abort" and len(made.tokens) == 1
        engine.resume()
        assert len(self.generate(engine, 3).tokens) == 3

    def wait_for_pause(self, engine) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not engine.is_paused:
            assert time.monotonic() < end, "no pause came"
            time.sleep(0.001)

    def test_readers_never_see_a_mixture(self, engine):
        """Requests come all the time while versions change; each answer is wholly of one version."""
        answers = {v: self.expected(v) for v in range(1, 9)}
        stop = threading.Event()

        def ask() -> list[Any]:
            out = []
            while not stop.is_set():
                out.append(self.answer(engine))
            return out

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(ask) for _ in range(3)]
            try:
                for version in range(2, 9):
                    self.update(engine, version)
            finally:
                stop.set()
            seen = [a for f in futures for a in f.result(TIMEOUT_S)]
        assert all(a in answers.values() for a in seen)
