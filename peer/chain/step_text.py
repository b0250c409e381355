"""The text of an inner step as a stage computes with it, made ready on a thread of its own while the step before is computed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peer.chain.quantize import BadTensor, ids_from
from peer.chain.reading import Ids, Read
from peer.training.trainer import StageTrainer


@dataclass(frozen=True, slots=True)
class Text:
    """The token ids of an inner step by micro-batch, [B, L+1] each: for the trainer (a GPU fetches them when it comes to them) and as
    arrays; `checks`: their checksums."""

    tensors: Sequence[Tensor] = ()
    arrays: Sequence[NDArray[np.int64]] = ()
    checks: Sequence[int] = ()


def ready(
    read: Read, trainer: StageTrainer, threads: Executor
) -> Callable[[int], Coroutine[Any, Any, Text | BadTensor]]:
    """What reads the text of a step and makes it ready for `trainer`, on `threads`; or says what is wrong with it."""

    def parts(ids: Ids) -> Text | BadTensor:
        train = trainer.train
        try:
            whole = ids_from(ids, (train.step_rows, train.sequence + 1), trainer.spec.vocab_size)
        except BadTensor as error:
            return error
        if trainer.device.type == "cuda":
            whole = whole.pin_memory()
        tensors = whole.reshape(train.micro_batches, train.rows, -1).unbind()
        arrays = [part.numpy() for part in tensors]
        return Text(tensors, arrays, [zlib.crc32(part.astype("<i8", copy=False)) for part in arrays])

    async def text(step: int) -> Text | BadTensor:
        return await asyncio.get_running_loop().run_in_executor(threads, parts, await read(step))

    return text
