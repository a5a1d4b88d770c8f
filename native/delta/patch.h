// Patches of whole objects: what changed in their regions, segment by segment; applying them to boxes elsewhere, and joining them.
#pragma once
#include "delta/box.h"
#include "delta/segment.h"

namespace mcr::delta {

// A row of a patch's index, as it is stored. Regions without changes have none, and segments without changes neither.
struct Segment {
  uint64_t begin;     // its first element in the region
  uint64_t offset;    // of its coded bytes in the payload
  uint64_t digest;    // what its changes add to the region's content digest
  uint64_t checksum;  // of the coded bytes
  uint32_t elements, changed;
  uint32_t nbytes;
  uint32_t region;
  uint32_t form;   // the first coded byte
  uint32_t spare;  // 0
};
static_assert(sizeof(Segment) == 56);

struct Encoded {
  std::vector<Segment> segments;  // ascending by region and begin
  std::vector<Bytes> coded;       // of each
  uint64_t nbytes = 0;            // of all of them
  void write(std::byte* to) const;
};

// A region of an object: where both versions of it lie, packed, and of which box of a tensor it is. Where that box lies does not matter.
struct Region {
  const std::byte* old;
  const std::byte* now;
  uint64_t elements, row_elements;
  Box index;  // simplified
  Classing classing;
};

// Several threads. Throws std::bad_alloc.
Encoded encode(const std::vector<Region>& regions);

// Coded bytes, segment.nbytes of them, wherever they came from.
struct Part {
  const uint8_t* coded;
  Segment segment;
};

// Which parts are damaged: their checksums are not right.
std::vector<size_t> damaged(const std::vector<Part>& parts);

enum class Mode : int { kCheck, kApply, kRevert };

struct Outcome {
  enum What : uint8_t {
    kDone,
    kBroken,  // nothing of it was applied: the bytes are not those of a segment
    kStale,   // it is coded against what was there, and that is not there, or not all of it
    kLeft,    // it was not tried, because others are stale
  } what = kBroken;
  Change change;  // in the box
};

// Adds changes to boxes, of which no two may overlap, on several threads; or takes them back; or only says what they would be. box[i], simplified,
// is for parts[i]. What is coded against what was there is decoded first, all of it, and if any is stale, nothing is written. It cannot be taken
// back. Throws std::bad_alloc, and then some may be applied.
std::vector<Outcome> apply(const std::vector<Part>& parts, const std::vector<const Box*>& boxes, Mode mode);

// One after another, as one: parts of the same segment of successive patches.
struct Chain {
  std::vector<Part> parts;
  const std::byte* old;  // the segment's elements before the first of them, packed; nullptr where they are not there
  int log;
  Classing classing;
};

// Chains ascend by region and begin. Elements that are again what they were are no changes. `bad`: the chains that cannot be decoded.
Encoded merge(const std::vector<Chain>& chains, std::vector<size_t>& bad);

}  // namespace mcr::delta
