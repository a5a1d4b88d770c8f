"""Batches of training data: `DataProto`, its rows and helpers, and `Ragged`, a column of rows of different lengths."""

from mooncake_ray.data.folding import fold_batch_dim, unfold_batch_dim
from mooncake_ray.data.item import DataProtoItem
from mooncake_ray.data.padding import pad_dataproto_to_divisor, unpad_dataproto
from mooncake_ray.data.proto import DataProto
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.data.reshaping import DataProtoConfig
from mooncake_ray.data.schema import FieldSchema

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "FieldSchema",
    "Ragged",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
]
