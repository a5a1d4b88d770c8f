#include "parking.h"

#include <algorithm>
#include <climits>

namespace mcr {

uint64_t Parking::add(Parked p) {
  const uint64_t serial = next_++;
  if (p.request.op == uint16_t(Op::kCreate)) creates_.push_back(serial);
  for (ObjectId id : p.ids) by_object_.emplace(id, serial);
  all_.emplace(serial, std::move(p));
  return serial;
}

bool Parking::remove(uint64_t serial) {
  auto it = all_.find(serial);
  if (it == all_.end()) return false;
  creates_.remove(serial);
  for (ObjectId id : it->second.ids) {
    auto [b, e] = by_object_.equal_range(id);
    while (b != e) b = b->second == serial ? by_object_.erase(b) : std::next(b);
  }
  all_.erase(it);
  return true;
}

const Parked* Parking::find(uint64_t serial) const {
  auto it = all_.find(serial);
  return it == all_.end() ? nullptr : &it->second;
}

std::vector<uint64_t> Parking::waiting_for(ObjectId id) const {
  std::vector<uint64_t> out;
  for (auto [b, e] = by_object_.equal_range(id); b != e; ++b) out.push_back(b->second);
  return out;
}

std::vector<uint64_t> Parking::expired(int64_t now) const {
  std::vector<uint64_t> out;
  for (const auto& [serial, p] : all_)
    if (p.deadline <= now) out.push_back(serial);
  return out;
}

int64_t Parking::next_deadline() const {
  int64_t at = INT64_MAX;
  for (const auto& [serial, p] : all_) at = std::min(at, p.deadline);
  return at;
}

int64_t Parking::oldest() const {
  int64_t at = INT64_MAX;
  for (const auto& [serial, p] : all_) at = std::min(at, p.since);
  return at;
}

size_t Parking::count(Op op) const {
  return size_t(std::count_if(all_.begin(), all_.end(), [&](const auto& p) { return p.second.request.op == uint16_t(op); }));
}

}  // namespace mcr
