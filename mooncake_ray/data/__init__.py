"""Batches of training data: `DataProto`, its rows and padding helpers, and `Ragged`, a column of rows of different lengths."""

from mooncake_ray.data.item import DataProtoItem
from mooncake_ray.data.padding import pad_dataproto_to_divisor, unpad_dataproto
from mooncake_ray.data.proto import DataProto
from mooncake_ray.data.ragged import Ragged

__all__ = ["DataProto", "DataProtoItem", "Ragged", "pad_dataproto_to_divisor", "unpad_dataproto"]
