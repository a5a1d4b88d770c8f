"""Batches of training data: `DataProto`, its rows and its padding helpers."""

from mooncake_ray.data.item import DataProtoItem
from mooncake_ray.data.padding import pad_dataproto_to_divisor, unpad_dataproto
from mooncake_ray.data.proto import DataProto

__all__ = ["DataProto", "DataProtoItem", "pad_dataproto_to_divisor", "unpad_dataproto"]
