// The content digest of a box of a tensor: the sum, modulo 2^64, of a term for each element.
#pragma once
#include "delta/box.h"

namespace mcr::delta {

// Of what lies in each box's memory. Uses several threads where there is much.
std::vector<uint64_t> digests(std::vector<Box> boxes);

// Of bytes that are no weights: of their 32-bit words, zeros after the end.
uint64_t checksum(const void* at, size_t nbytes);

}  // namespace mcr::delta
