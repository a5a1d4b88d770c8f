#include "table.h"

#include <algorithm>

namespace mcr {

Table::Session* Table::find(SessionId s) {
  auto it = sessions_.find(s);
  return it == sessions_.end() ? nullptr : &it->second;
}

Table::Object* Table::find(const std::pair<ObjectId, uint64_t>& claimed) {
  auto it = objects_.find(claimed.first);
  return it == objects_.end() || it->second.birth != claimed.second ? nullptr : &it->second;
}

void Table::extend(uint32_t arena, uint64_t bytes) {
  arenas_.at(arena).extend(bytes / kPageSize);
  effects_.freed = true;
}

void Table::stop_growing() {
  growing_ = false;
  effects_.freed = true;  // not quite, but orphans may go now
}

uint64_t Table::populated_bytes() const {
  uint64_t n = 0;
  for (const auto& a : arenas_) n += a.total_pages() * kPageSize;
  return n;
}

uint64_t Table::used_bytes(int place) const {
  uint64_t n = 0;
  for (uint32_t a = 0; a < arenas_.size(); ++a)
    if (places_[a] == place) n += arena_used(a);
  return n;
}

// ---- sessions

uint32_t Table::group_of(std::string_view name) {
  if (name.empty()) return 0;
  uint32_t spare = 0;
  for (uint32_t g = 1; g < groups_.size(); ++g) {
    if (groups_[g].name == name) return g;
    if (!groups_[g].sessions && !groups_[g].objects) spare = g;
  }
  if (!spare) spare = uint32_t(groups_.size()), groups_.emplace_back();
  groups_[spare].name = name;
  return spare;
}

void Table::open_session(SessionId s, int32_t pid, std::string label, std::string_view group, uint64_t born) {
  Session& n = sessions_[s];
  n.pid = pid;
  n.born = born;
  n.label = std::move(label);
  n.group = group_of(group);
  n.since = now_;
  ++groups_[n.group].sessions;
  if (second_life_) of_this_life_.insert(s);
  if (saving_) effects_.saved.sessions.push_back(s);
}

void Table::close_session(SessionId s) {
  auto it = sessions_.find(s);
  if (it == sessions_.end()) return;
  listen(s, false);
  Session dead = std::move(it->second);
  sessions_.erase(it);
  if (saving_) effects_.saved.sessions.push_back(s);
  --groups_[dead.group].sessions;
  ++counters_.reaped_sessions;
  for (ObjectId id : dead.leases) {
    ++counters_.reaped_leases;
    drop(objects_.find(id));
  }
  for (auto& [id, n] : dead.pins) {
    counters_.reaped_pins += n;
    unpin(id, n);
  }
  for (const ClaimKey& key : dead.claims) {
    auto c = claims_.find(key);
    if (c == claims_.end()) continue;
    c->second.owner = 0;
    touch(key);
    if (c->second.handover) c->second.asked.clear(), ask(c, true);
    else end_claim(c);
  }
  for (const ClaimKey& key : std::vector<ClaimKey>(inquiries_.begin(), inquiries_.end())) {
    auto c = claims_.find(key);
    if (c->second.inquirer != s) continue;
    c->second.inquirer = 0;
    inquiries_.erase(key);
    if (c->second.objects.empty()) end_claim(c);
  }
}

bool Table::holds_anything(SessionId s) const {
  auto it = sessions_.find(s);
  return it != sessions_.end() && (!it->second.leases.empty() || !it->second.pins.empty());
}

bool Table::owns_anything(SessionId s) const {
  auto it = sessions_.find(s);
  return it != sessions_.end() && !it->second.claims.empty();
}

// ---- memory

bool Table::take_pages(Object& o, int place) {
  auto from = [&](uint32_t a) {
    auto e = arenas_[a].allocate(o.pages);
    if (!e) return false;
    o.arena = a;
    o.node = e->node;
    o.offset = e->first * kPageSize;
    account(o, [&](Usage& u) { u.used += o.bytes(); });
    return true;
  };
  for (bool near : {true, false})
    for (uint32_t a = 0; a < arenas_.size(); ++a)
      if ((places_[a] == place) == near && from(a)) return true;
  return false;
}

bool Table::over_quota(const Object& o) const { return limits_.quota && groups_[o.group].usage.used + o.bytes() > limits_.quota; }

Status Table::allocate(Object& o, int place) {
  while (over_quota(o)) {
    if (evict_one_clean(o.group)) continue;
    if (room_is_coming(o.group) || !evict_one_orphan(o.group)) return Status::kQuota;
  }
  for (;;) {
    if (take_pages(o, place)) return Status::kOk;
    if (evict_one_clean({})) continue;
    if (growing_ && populated_bytes() < limits_.capacity) return Status::kFull;  // there is room, or will be
    if (room_is_coming({}) || !evict_one_orphan({})) return Status::kFull;
  }
}

void Table::free_pages(Object& o) {
  no_longer_ahead(o);
  arenas_[o.arena].free(o.node);
  o.node = PageAllocator::kNil;
  account(o, [&](Usage& u) { u.used -= o.bytes(); });
  effects_.freed = true;
}

// Puts an object into the queue that it belongs to. What stays where it is keeps its place.
void Table::settle(ObjectId id, Object& o) {
  Idle now = Idle::kNone;
  if (o.sealed && !o.pins && o.in_memory() && o.io == Io::kNone) now = o.on_disk() || o.is_spare() ? Idle::kClean : Idle::kDirty;
  if (now == o.idle) return;
  if (o.idle == Idle::kClean) account(o, [&](Usage& u) { u.clean -= o.bytes(); });
  if (o.idle != Idle::kNone) (o.idle == Idle::kClean ? clean_ : dirty_).erase(o.queued);
  o.idle = now;
  if (now == Idle::kNone) return;
  auto& queue = now == Idle::kClean ? clean_ : dirty_;
  o.queued = queue.insert(queue.end(), id);
  if (now == Idle::kDirty) return;
  account(o, [&](Usage& u) { u.clean += o.bytes(); });
  effects_.freed = true;
}

bool Table::evict_one_clean(std::optional<uint32_t> group) {
  for (ObjectId id : clean_) {
    Object& o = objects_.at(id);
    if (group && o.group != *group) continue;
    if (!o.on_disk()) {
      remove(id);
      return true;
    }
    free_pages(o);
    settle(id, o);
    return true;
  }
  return false;
}

bool Table::evict_one_orphan(std::optional<uint32_t> group) {
  for (const ClaimKey& key : orphans_) {
    auto it = claims_.find(key);
    const bool frees = std::any_of(it->second.objects.begin(), it->second.objects.end(), [&](const auto& claimed) {
      const Object* o = find(claimed);
      return o && o->in_memory() && o->io == Io::kNone && o->pins == 0 && o->claims == 1 && (!group || o->group == *group);
    });
    if (!frees) continue;
    ++counters_.orphans_dropped;
    end_claim(it);
    return true;
  }
  return false;
}

// ---- objects

Status Table::create(SessionId s, ObjectId id, uint64_t size, Location* out, std::string_view note, int place) {
  Session* n = find(s);
  if (!n || !id || note.size() > kNoteMax) return Status::kBad;
  if (objects_.contains(id)) return Status::kExists;
  Object o;
  o.creator = s;
  o.group = n->group;
  o.size = size;
  if (size > limits_.capacity) return Status::kTooLarge;
  o.pages = pages_of(size);
  if (limits_.quota && o.bytes() > limits_.quota) return Status::kTooLarge;
  if (const Status st = allocate(o, place); st != Status::kOk) return st;
  o.birth = ++births_;
  o.since = now_;
  o.note = note;
  *out = {o.arena, o.offset, o.size, nullptr};
  n->leases.insert(id);
  ++groups_[o.group].objects;
  objects_.emplace(id, std::move(o));
  return Status::kOk;
}

Status Table::seal(SessionId s, ObjectId id, const ClaimKey& key, bool handover, const std::vector<ObjectId>& also) {
  Session* n = find(s);
  if (!n || key.kind == uint32_t(ClaimKind::kNone) || (!id && also.empty())) return Status::kBad;
  if (id && !n->leases.contains(id)) return Status::kMissing;
  for (ObjectId a : also)
    if (presence(a) != Presence::kReadable) return Status::kMissing;
  std::vector<ObjectId> ids = also;
  if (id) {
    n->leases.erase(id);
    Object& o = objects_.at(id);
    o.sealed = true;
    ++counters_.puts;
    counters_.bytes_put += o.size;
    effects_.changed.push_back(id);
    ids.push_back(id);
    settle(id, o);
  }
  add_claim(s, key, handover, ids);
  return Status::kOk;
}

Status Table::put_inline(SessionId s, ObjectId id, std::string_view bytes, const ClaimKey& key, bool handover) {
  Session* n = find(s);
  if (!n || !id || key.kind == uint32_t(ClaimKind::kNone) || bytes.size() > kInlineMax) return Status::kBad;
  if (objects_.contains(id)) return Status::kExists;
  if (inline_used_ + bytes.size() > limits_.inline_budget) return Status::kFull;
  Object o;
  o.sealed = true;
  o.creator = s;
  o.group = n->group;
  o.size = bytes.size();
  o.birth = ++births_;
  o.since = now_;
  o.inlined = bytes;
  inline_used_ += bytes.size();
  ++groups_[o.group].objects;
  ++counters_.puts;
  counters_.bytes_put += bytes.size();
  objects_.emplace(id, std::move(o));
  effects_.changed.push_back(id);
  add_claim(s, key, handover, {id});
  return Status::kOk;
}

Status Table::abort(SessionId s, ObjectId id) {
  Session* n = find(s);
  if (!n || !n->leases.erase(id)) return Status::kMissing;
  drop(objects_.find(id));
  return Status::kOk;
}

Table::Presence Table::presence(ObjectId id) const {
  auto it = objects_.find(id);
  if (it == objects_.end() || it->second.removed) return Presence::kMissing;
  return it->second.sealed ? Presence::kReadable : Presence::kLeased;
}

// Freed, or never there; after a restart, also: gone with the broker that had it.
Status Table::absent(ObjectId id) const {
  if (!second_life_ || of_this_life_.contains(id.hi)) return Status::kMissing;
  auto s = sessions_.find(id.hi);
  return s == sessions_.end() || id.lo < s->second.first_counter ? Status::kLost : Status::kMissing;
}

Status Table::get(SessionId s, ObjectId id, Location* out, bool may_wait) {
  Session* n = find(s);
  if (!n) return Status::kBad;
  if (presence(id) != Presence::kReadable) return absent(id);
  Object& o = objects_.at(id);
  *out = {o.arena, o.offset, o.size, nullptr};
  Status found = Status::kOk;
  if (o.is_inline()) {
    ++counters_.gets;
    out->inlined = &o.inlined;
    return Status::kInline;
  }
  if (!o.in_memory() || o.io == Io::kReading) {
    if (o.damaged) return Status::kDamaged;
    if (may_wait && (o.io == Io::kReading || start_read(id, o))) return Status::kWait;
    ++counters_.served_from_disk;
    out->offset = o.disk;
    found = Status::kOnDisk;
  }
  ++counters_.gets;
  ++o.pins;
  ++n->pins[id];
  settle(id, o);
  if (o.ahead) {
    no_longer_ahead(o);
    if (may_wait) read_ahead();
  }
  return found;
}

void Table::release(SessionId s, ObjectId id) {
  Session* n = find(s);
  if (!n) return;
  auto p = n->pins.find(id);
  if (p == n->pins.end()) return;
  if (--p->second == 0) n->pins.erase(p);
  unpin(id, 1);
}

void Table::unpin(ObjectId id, uint64_t n) {
  Object& o = objects_.at(id);
  o.pins -= n;
  settle(id, o);
  maybe_drop(id);
}

void Table::remove(ObjectId id) {
  auto it = objects_.find(id);
  if (it == objects_.end() || !it->second.sealed || it->second.removed) return;
  end_now(id, it->second);
  for (ClaimKind kind : {ClaimKind::kSelf, ClaimKind::kReplica}) end_claim_named_after(id, kind);
  maybe_drop(id);
}

// Whoever freed the object.
void Table::end_claim_named_after(ObjectId id, ClaimKind kind) {
  ClaimKey key{uint32_t(kind)};
  std::memcpy(key.bytes, &id, sizeof id);
  if (auto c = claims_.find(key); c != claims_.end()) end_claim(c);
}

void Table::watch(SessionId s, ObjectId id) {
  if (!find(s)) return;
  if (auto it = objects_.find(id); it != objects_.end() && !it->second.removed) it->second.watchers.push_back(s);
  else effects_.gone.emplace_back(s, id);
}

void Table::tell_watchers(ObjectId id, Object& o) {
  for (SessionId s : std::exchange(o.watchers, {})) effects_.gone.emplace_back(s, id);
}

void Table::maybe_drop(ObjectId id) {
  auto it = objects_.find(id);
  if (it == objects_.end()) return;
  Object& o = it->second;
  if (!o.sealed || o.pins || (o.claims && !o.removed)) return;
  if (o.io == Io::kNone) return drop(it);
  if (!o.removed) end_now(id, o);  // its memory is in use: it goes when that ends
}

// From now on nobody finds it, here or in another life. What it occupies is freed by `drop`.
void Table::end_now(ObjectId id, Object& o) {
  o.removed = true;
  tell_watchers(id, o);
  effects_.changed.push_back(id);
  if (saving_ && o.on_disk()) effects_.saved.objects.push_back(id);
}

void Table::drop(ObjectIt it) {
  Object& o = it->second;
  if (o.is_inline()) inline_used_ -= o.size;
  if (o.in_memory()) free_pages(o);
  settle(it->first, o);
  if (saving_ && o.on_disk()) effects_.saved.objects.push_back(it->first);
  if (o.extent != PageAllocator::kNil) free_extent(o);
  --groups_[o.group].objects;
  tell_watchers(it->first, o);
  effects_.changed.push_back(it->first);
  objects_.erase(it);
}

}  // namespace mcr
