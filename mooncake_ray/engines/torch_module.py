"""`TorchModuleEngine`: the reference engine, over a plain torch module."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from mooncake_ray.engines.base import PauseMode, UpdateInfo
from mooncake_ray.engines.derived import Derived
from mooncake_ray.engines.gate import Gate
from mooncake_ray.engines.generation import Generation, GrowingSpans, next_token
from mooncake_ray.engines.served import Served
from mooncake_ray.errors import EnginePausedError, EnginePoisonedError, WeightSyncError
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.source import ModuleSource

__all__ = ["TorchModuleEngine"]

Digest = Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...]], int]


class TorchModuleEngine:
    """Serves a module, and changes its weights in place. See `EngineAdapter` for the calls of an update.

    `forward` and `generate` may be called from any thread; they compute without autograd, and never while weights are written. The module's
    parameters stay at their addresses; so does what is derived from them.
    """

    name: ClassVar[str] = "torch_module"

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        shard: Shard | None = None,
        derived: Mapping[str, Callable[[torch.nn.Module], torch.Tensor]] | None = None,
        post_load: Callable[[torch.nn.Module], None] | None = None,
        weight_version: int | None = None,
        patience_s: float = 300.0,
    ) -> None:
        """
        Args:
            shard: where the weights lie; by default each parameter and persistent buffer under its own name (see `TracedTarget` for others).
            derived: tensors that are computed from weights, by the name they have in the module ("layers.0.attn.w_kc"); computed anew after an
                update, and copied to where they are.
            post_load: called after an update and after `derived`; the module's own `post_load_weights` by default. It may change tensors, not
                put others in their place.
            weight_version: of what the module holds now.
            patience_s: how long a request waits for the end of a pause.

        Raises:
            PlanError: the shard does not fit the module, or a derived tensor is not there.
        """
        self.module = module
        self._weights = Served(self.name, shard if shard is not None else ModuleSource(module), version=weight_version)
        self._derived = Derived(module, derived or {}, post_load or getattr(module, "post_load_weights", None))
        self._gate = Gate(patience_s)
        self._control = threading.RLock()

    def shard(self) -> Shard:
        return self._weights.shard

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    @property
    def poisoned(self) -> str:
        return self._weights.poisoned

    @property
    def is_paused(self) -> bool:
        return self._gate.is_paused

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """There is nothing to make ready; the settings are for others."""
        with self._control:
            if self._weights.is_open:
                raise WeightSyncError("an update is open")
            self.init_info = dict(init_info)

    # Serving

    @contextmanager
    def serving(self) -> Iterator[int | None]:
        """Weights stay as they are within; gives their version. For whoever reads them or computes with them.

        Raises:
            EnginePoisonedError: they are of no version.
            EnginePausedError: the engine is paused, and refuses requests.
        """
        with self._gate.request() as begun, self._gate.step(begun), torch.no_grad():
            self._refuse_poisoned()
            yield self._weights.version

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. Raises as `serving`."""
        with self.serving():
            return self.module(*args, **kwargs)

    def generate(self, tokens: Sequence[int], max_new_tokens: int) -> Generation:
        """Greedy. Between two tokens a pause, and so another version, may come; each token says which version made it.

        Returns:
            What there is when the last token is made, or when a pause ends the request.

        Raises:
            EnginePoisonedError: the weights became a mixture, before or meanwhile.
            EnginePausedError: the engine was paused, and refused the request.
        """
        spans = GrowingSpans()
        out: list[int] = []
        with self._gate.request() as begun:
            for _ in range(max_new_tokens):
                try:
                    with self._gate.step(begun), torch.no_grad():
                        self._refuse_poisoned()
                        out.append(next_token(self.module, [*tokens, *out]))
                        spans.add(self._weights.version)
                except EnginePausedError:
                    return Generation(tuple(out), spans.closed(), "abort")
        return Generation(tuple(out), spans.closed(), "length")

    def pause(self, mode: PauseMode = "keep", *, timeout_s: float = 60.0) -> None:
        self._gate.pause(mode, timeout_s)

    def resume(self) -> None:
        with self._control:
            if self._weights.has_written:
                raise WeightSyncError("an update has begun to write: finish it or abort it first")
            self._gate.resume()

    # Updates

    def start_weight_update(self) -> None:
        with self._control:
            self._weights.open()

    def prepare_weights(self, update_info: UpdateInfo) -> None:
        """Weights are written in place: there is nothing to prepare."""
        with self._control:
            self._weights.prepare(update_info)

    def update_weights(self, update_info: UpdateInfo) -> None:
        with self._control, torch.no_grad():
            if self._weights.is_open and not self._gate.is_paused:
                raise WeightSyncError("weights are only written while the engine is paused")
            self._weights.write(update_info)

    def finish_weight_update(self, weight_version: int) -> None:
        with self._control, torch.no_grad():
            self._weights.finish(weight_version, self._derived.refresh)

    def abort_weight_update(self) -> None:
        with self._control:
            self._weights.abort()

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter and buffer that there are weights in, by the engine's own name, in hex. Not while an
        update writes; also of a paused or poisoned engine."""
        with self._control:
            return {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in self.shard().buffers().items()}

    def digests(self, digest: Digest = content_digest) -> dict[str, int]:
        """For each tensor of the model the digest of what this rank has of it, independent of how it lies here.

        Args:
            digest: of a box: gets a view, where the box begins in the whole tensor, and the shape of the whole. Digests of parts are added,
                mod 2**64.

        Not while an update writes; also of a paused or poisoned engine.
        """
        p, out, seen = self._weights.placement, {}, set()
        with self._control, torch.no_grad():
            for i, view in enumerate(views(p, self.shard().buffers())):
                meta = p.metas[p.tensor[i]]
                d = len(meta.shape)
                lo, hi = (tuple(a[i].tolist()[p.lo.shape[1] - d :]) for a in (p.lo, p.hi))
                if (meta.name, lo, hi) not in seen:  # a box that is here twice counts once
                    seen.add((meta.name, lo, hi))
                    view = view.reshape(view.shape[view.dim() - d :]) if view.dim() > d else view
                    out[meta.name] = (out.get(meta.name, 0) + digest(view, lo, meta.shape)) % 2**64
        return out

    def _refuse_poisoned(self) -> None:
        if self.poisoned:
            raise EnginePoisonedError(f"{self.poisoned}; all weights must be written anew")


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
