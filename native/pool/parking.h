// Requests that wait: creates for room, first come first served; gets and waits for objects. Knows nothing of how they are answered.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "wire.h"

namespace mcr {

struct Parked {
  int fd = -1;  // of the connection that waits for the answer
  Request request;
  std::vector<ObjectId> ids;
  std::string note;
  int64_t since = 0, deadline = 0;  // ns on the monotonic clock
};

class Parking {
 public:
  uint64_t add(Parked p);  // returns its serial, never 0
  bool remove(uint64_t serial);
  const Parked* find(uint64_t serial) const;
  const std::list<uint64_t>& creates() const { return creates_; }  // in order of arrival
  std::vector<uint64_t> waiting_for(ObjectId id) const;
  std::vector<uint64_t> expired(int64_t now) const;
  int64_t next_deadline() const;  // INT64_MAX: none
  int64_t oldest() const;         // since when the one that waits longest does; INT64_MAX: none
  size_t count(Op op) const;

 private:
  std::map<uint64_t, Parked> all_;
  std::list<uint64_t> creates_;
  std::unordered_multimap<ObjectId, uint64_t> by_object_;
  uint64_t next_ = 1;
};

}  // namespace mcr
