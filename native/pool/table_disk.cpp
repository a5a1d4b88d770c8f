// The table's dealings with the disk: what is written and read back, and what a later broker finds there.
#include <algorithm>

#include "table.h"

namespace mcr {
namespace {

constexpr uint64_t kMostWriting = 256 << 20;  // bytes handed to the disk at a time: what is freed meanwhile need not be written
constexpr uint64_t kDiskStep = 64 << 20;      // bytes by which the spill file grows

}  // namespace

// ---- spilling

bool Table::room_is_coming(std::optional<uint32_t> group) const {
  const Usage& usage = group ? groups_[*group].usage : usage_;
  if (usage.writing) return true;
  if (!limits_.disk || disk_refuses_) return false;
  return std::any_of(dirty_.begin(), dirty_.end(), [&](ObjectId id) { return !group || objects_.at(id).group == *group; });
}

void Table::make_room(uint64_t wanted, SessionId who) {
  if (!limits_.disk || disk_refuses_) return;
  const Session* n = find(who);
  const bool growing = growing_ && populated_bytes() < limits_.capacity;
  const bool quota_first = n && limits_.quota && groups_[n->group].usage.used + wanted > limits_.quota;
  relieve(usage_, limits_.capacity, growing || quota_first ? 0 : wanted, {});
  if (!limits_.quota) return;
  for (uint32_t g = 0; g < groups_.size(); ++g) relieve(groups_[g].usage, limits_.quota, quota_first && n->group == g ? wanted : 0, g);
}

void Table::relieve(const Usage& usage, uint64_t limit, uint64_t wanted, std::optional<uint32_t> group) {
  const uint64_t high = uint64_t(double(limit) * limits_.high), low = uint64_t(double(limit) * limits_.low), pressing = usage.pressing();
  uint64_t goal = pressing > high ? pressing - low : 0;
  goal = std::max(goal, wanted - std::min(wanted, usage.writing));
  for (auto i = dirty_.begin(); goal && i != dirty_.end() && usage_.writing < kMostWriting;) {
    const ObjectId id = *i++;
    Object& o = objects_.at(id);
    if (group && o.group != *group) continue;
    if (!start_write(id, o)) return;
    goal -= std::min(goal, o.bytes());
  }
}

bool Table::start_write(ObjectId id, Object& o) {
  auto extent = disk_.allocate(o.pages);
  if (!extent) {
    const uint64_t have = disk_.total_pages() * kPageSize, left = limits_.disk - std::min(limits_.disk, have);
    disk_.extend(std::min(left, std::max(o.bytes(), kDiskStep)) / kPageSize);
    extent = disk_.allocate(o.pages);
  }
  if (!extent) {
    disk_refuses_ = true;
    disk_error_ = "the spill file has reached its limit of " + std::to_string(limits_.disk) + " bytes";
    return false;
  }
  o.extent = extent->node;
  o.disk = extent->first * kPageSize;
  disk_used_ += o.bytes();
  o.io = Io::kWriting;
  settle(id, o);
  account(o, [&](Usage& u) { u.writing += o.bytes(); });
  effects_.writes.push_back({id, o.arena, o.offset, o.disk, o.bytes()});
  return true;
}

void Table::written(ObjectId id, const std::string& error) {
  Object& o = objects_.at(id);
  o.io = Io::kNone;
  account(o, [&](Usage& u) { u.writing -= o.bytes(); });
  if (error.empty()) {
    counters_.spill_written_bytes += o.bytes();
    if (!disk_refuses_) disk_error_.clear();
    by_place_[o.disk] = id;
    if (saving_) effects_.saved.objects.push_back(id);
  } else {
    disk_refuses_ = true;
    disk_error_ = error;
    free_extent(o);
    effects_.freed = true;  // not quite, but orphans may go now
  }
  settle(id, o);
  maybe_drop(id);
}

bool Table::start_read(ObjectId id, Object& o) {
  if (!read_one(id, o)) return false;
  const bool in_order = o.disk == read_to_;
  read_to_ = o.disk + o.bytes();
  if (in_order) read_ahead();
  return true;
}

// Batches are mostly read in the order in which they were put, and so spilled: then the disk works while the reader does.
void Table::read_ahead() {
  for (auto next = by_place_.find(read_to_); next != by_place_.end() && next->first == read_to_; ++next) {
    Object& o = objects_.at(next->second);
    if (!o.in_memory()) {
      const uint64_t before = ahead_, room = free_bytes() + usage_.clean - std::min(usage_.clean, ahead_);
      if (o.damaged || o.removed || ahead_ + o.bytes() > limits_.read_ahead || room < o.bytes() || !read_one(next->second, o)) return;
      const bool at_the_cost_of_others = ahead_ < before;  // the room was in pieces
      o.ahead = true;
      ahead_ += o.bytes();
      if (at_the_cost_of_others) return;
    }
    read_to_ += o.bytes();
  }
}

void Table::no_longer_ahead(Object& o) {
  if (std::exchange(o.ahead, false)) ahead_ -= o.bytes();
}

uint64_t Table::free_bytes() const {
  uint64_t n = 0;
  for (const auto& a : arenas_) n += a.free_pages() * kPageSize;
  return n;
}

bool Table::read_one(ObjectId id, Object& o) {
  if (free_bytes() + usage_.clean < o.bytes()) return false;
  while (over_quota(o))
    if (!evict_one_clean(o.group)) return false;
  while (!take_pages(o, -1))
    if (!evict_one_clean({})) return false;
  o.io = Io::kReading;
  effects_.reads.push_back({id, o.arena, o.offset, o.disk, o.bytes()});
  return true;
}

void Table::read_back(ObjectId id, const std::string& error) {
  Object& o = objects_.at(id);
  o.io = Io::kNone;
  if (error.empty()) {
    counters_.spill_read_bytes += o.bytes();
  } else {
    o.damaged = true;
    disk_error_ = error;
    free_pages(o);
  }
  effects_.changed.push_back(id);
  settle(id, o);
  maybe_drop(id);
}

void Table::free_extent(Object& o) {
  disk_.free(o.extent);
  by_place_.erase(o.disk);
  o.extent = PageAllocator::kNil;
  disk_used_ -= o.bytes();
  effects_.holes.emplace_back(o.disk, o.bytes());
}

// ---- another life

Table::Names Table::all_saved() {
  saving_ = true;
  Names all;
  for (const auto& [s, n] : sessions_) all.sessions.push_back(s);
  for (const auto& [id, o] : objects_)
    if (o.on_disk()) all.objects.push_back(id);
  for (const auto& [key, c] : claims_) all.claims.push_back(key);
  return all;
}

std::optional<SavedSession> Table::saved(SessionId s) const {
  auto it = sessions_.find(s);
  if (it == sessions_.end()) return std::nullopt;
  const Session& n = it->second;
  return SavedSession{s, n.pid, n.born, n.label, groups_[n.group].name};
}

std::optional<SavedObject> Table::saved(ObjectId id) const {
  auto it = objects_.find(id);
  if (it == objects_.end() || !it->second.on_disk() || it->second.removed) return std::nullopt;
  const Object& o = it->second;
  return SavedObject{id, o.creator, o.size, o.disk / kPageSize, groups_[o.group].name, o.note};
}

std::optional<SavedClaim> Table::saved(const ClaimKey& key) const {
  auto it = claims_.find(key);
  if (it == claims_.end() || it->second.objects.empty()) return std::nullopt;  // an inquiry is not saved
  const Claim& c = it->second;
  SavedClaim out{key, c.owner, c.creator, c.handover, c.inherited, {}};
  for (const auto& claimed : c.objects)
    if (find(claimed)) out.objects.push_back(claimed.first);
  return out;
}

void Table::restore(const SavedSession& s) {
  second_life_ = true;
  open_session(s.id, s.pid, s.label, s.group, s.born);
  of_this_life_.erase(s.id);
  sessions_.at(s.id).first_counter = UINT64_MAX;  // until it says how far it had come
}

void Table::restore(const SavedObject& s) {
  Object o;
  o.sealed = true;
  o.creator = s.creator;
  o.group = group_of(s.group);
  o.size = s.size;
  o.pages = pages_of(s.size);
  o.disk = s.disk_page * kPageSize;
  o.note = s.note;
  o.birth = ++births_;
  o.since = now_;
  if (objects_.emplace(s.id, std::move(o)).second) ++groups_[group_of(s.group)].objects;
}

void Table::restore(const SavedClaim& s) {
  Claim c;
  for (ObjectId id : s.objects) {
    auto o = objects_.find(id);
    if (o == objects_.end()) continue;
    c.objects.emplace_back(id, o->second.birth);
    ++o->second.claims;
    if (s.key.kind == uint32_t(ClaimKind::kReplica)) ++o->second.replicas;
  }
  if (c.objects.empty()) return;
  c.creator = s.creator;
  c.handover = s.handover;
  c.inherited = s.inherited;
  c.restored = true;
  Session* owner = find(s.owner);
  if (owner) c.owner = s.owner, owner->claims.insert(s.key);
  else c.orphan = orphans_.insert(orphans_.end(), s.key);
  claims_.insert_or_assign(s.key, std::move(c));
}

void Table::restored() {
  second_life_ = true;
  std::vector<std::pair<uint64_t, ObjectId>> by_place;
  for (auto& [id, o] : objects_) by_place.emplace_back(o.disk / kPageSize, id);
  std::sort(by_place.begin(), by_place.end());
  // Of what nobody wants, and of those that share a place, none of which can be trusted to be what it was, nothing is kept.
  uint64_t end = 0;
  Object* last = nullptr;  // it ends there
  for (auto& [page, id] : by_place) {
    Object& o = objects_.at(id);
    if (page < end) o.claims = last->claims = o.replicas = last->replicas = 0;
    if (page + o.pages > end) end = page + o.pages, last = &o;
  }
  for (auto& [page, id] : by_place) {
    auto it = objects_.find(id);
    Object& o = it->second;
    if (!o.claims) {
      drop(it);
      continue;
    }
    if (const uint64_t from = disk_.total_pages(); page > from) {
      disk_.extend(page - from);
      effects_.holes.emplace_back(from * kPageSize, (page - from) * kPageSize);
    }
    o.extent = disk_.append(o.pages);
    by_place_[o.disk] = id;
    disk_used_ += o.bytes();
  }
  for (auto it = claims_.begin(); it != claims_.end();) {
    const auto claim = it++;
    const auto& named = claim->second.objects;
    if (std::none_of(named.begin(), named.end(), [&](const auto& claimed) { return find(claimed); })) end_claim(claim);
  }
}

void Table::resume(SessionId s, uint64_t next_counter) {
  if (Session* n = find(s)) n->first_counter = next_counter;
}

}  // namespace mcr
