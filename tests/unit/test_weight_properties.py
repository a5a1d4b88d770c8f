"""Random models from random layouts to random layouts, by every mode: bit for bit the unsharded model, or nothing has changed."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from local_group import Group
from weight_models import Part, Weights, examples, layouts, models

MODES = ("p2p", "nccl", "delta", "auto")


def tries(n: int) -> settings:
    return settings(
        max_examples=examples(n),
        deadline=None,
        phases=set(Phase) - {Phase.explain},  # takes minutes here, and explains little
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class Setup:
    """Trainers with weights, and engines without, joined to a group."""

    def __init__(self, data: st.DataObject, group: Group, *, most: int = 4) -> None:
        self.group, self.model, self._data, self._most = group, data.draw(models()), data, most
        self._seed = data.draw(st.integers(0, 2**32 - 1))
        self.weights = Weights(self.model, self._seed)
        self.trained = self.parts(data.draw(layouts(self.model, source=True, most=most)))
        for rank, part in enumerate(self.trained):
            group.trainer(part.shard, rank, len(self.trained))
        self.served: dict[str, list[Part]] = {}
        self._like = None
        self.write()

    def parts(self, layout) -> list[Part]:
        out = []
        for held in layout.ranks:
            self._seed += 1
            out.append(Part(held, self._seed))
        return out

    def write(self) -> None:
        for part in self.trained:
            part.fill(self.weights)

    def change(self, how: str) -> None:
        self.weights.change(how)
        self.write()

    def join(self) -> str:
        """One more engine, laid out like the last one or otherwise."""
        name = f"e{len(self.served)}"
        if self._like is None or self._data.draw(st.booleans()):
            self._like = self._data.draw(layouts(self.model, source=False, most=self._most))
        self.served[name] = self.parts(self._like)
        for rank, part in enumerate(self.served[name]):
            self.group.engine(part.shard, name, rank, len(self.served[name]))
        return name

    def check(self, version: int) -> None:
        assert self.group.versions() == dict.fromkeys(self.served, version)
        for name, parts in self.served.items():
            for rank, part in enumerate(parts):
                assert not (wrong := part.has(self.weights)), f"{name}/{rank} at version {version}: {wrong}"
        for part in self.trained:
            assert not (wrong := part.has(self.weights)), f"a trainer: {wrong}"


@st.composite
def ways(draw) -> list[tuple[str, str]]:
    """(mode, or "publish" for not at all; what changed since the last version) for some versions; the last one is delivered."""
    changes = st.sampled_from(["some", "some", "all", "tensor", "none"])
    some = draw(st.lists(st.tuples(st.sampled_from([*MODES, "publish"]), changes), max_size=4))
    return [*some, (draw(st.sampled_from(MODES)), draw(changes))]


@tries(150)
@given(st.data(), st.integers(64, 5000), st.sampled_from(MODES), ways())
def test_every_engine_has_the_unsharded_model(data, bucket_bytes, mode, ways):
    with Group(mode=mode, bucket_bytes=bucket_bytes) as group:
        setup = Setup(data, group)
        for _ in range(data.draw(st.integers(1, 3))):
            setup.join()
        version, late = -1, data.draw(st.integers(0, 4))
        for number, (way, change) in enumerate(ways):
            setup.change(change)
            version += 1
            if way == "publish":
                assert group.publish() == version
                continue
            if number == late:
                setup.join()
            report = group.sync(version, mode=way)
            event(f"mode {report.mode}")
            assert report.version == version and not report.lost
            assert way == "auto" or (report.mode == way and not [f for f in report.fallbacks if not f.startswith("delta: ")])
            setup.check(version)
        assert all(engine.weight_version == version for ranks in group.engines.values() for engine in ranks)
