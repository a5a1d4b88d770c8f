#include "table.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace mcr {
namespace {

std::string human(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double v = double(bytes);
  int u = 0;
  while (v >= 1024 && u < 4) v /= 1024, ++u;
  char buf[32];
  std::snprintf(buf, sizeof buf, u ? "%.1f %s" : "%.0f %s", v, kUnits[u]);
  return buf;
}

std::string quoted(std::string_view s) {
  std::string out = "\"";
  for (unsigned char c : s) {
    if (c == '"' || c == '\\') out += '\\', out += char(c);
    else if (c < 0x20 || c >= 0x7f) out += '?';
    else out += char(c);
  }
  return out + "\"";
}

}  // namespace

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

// ---- sessions

void Table::open_session(SessionId s, int32_t pid, std::string label) {
  Session& n = sessions_[s];
  n.pid = pid;
  n.label = std::move(label);
}

void Table::listen(SessionId s, bool on) {
  Session* n = find(s);
  if (!n || n->listens == on) return;
  n->listens = on;
  if (on) return;
  for (const ClaimKey& key : std::exchange(n->queried, {}))
    if (auto c = claims_.find(key); c != claims_.end()) answered(c, s);
}

void Table::close_session(SessionId s) {
  auto it = sessions_.find(s);
  if (it == sessions_.end()) return;
  listen(s, false);
  Session dead = std::move(it->second);
  sessions_.erase(it);
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
    if (c->second.handover) c->second.asked.clear(), ask(c, true);
    else end_claim(c);
  }
}

bool Table::holds_anything(SessionId s) const {
  auto it = sessions_.find(s);
  return it != sessions_.end() && (!it->second.leases.empty() || !it->second.pins.empty());
}

// ---- objects

bool Table::allocate(Object& o) {
  o.pages = std::max<uint64_t>(1, (o.size + kPageSize - 1) / kPageSize);
  for (;;) {
    for (uint32_t a = 0; a < arenas_.size(); ++a) {
      if (auto e = arenas_[a].allocate(o.pages)) {
        o.arena = a;
        o.node = e->node;
        o.offset = e->first * kPageSize;
        used_ += o.pages * kPageSize;
        return true;
      }
    }
    if (growing_ && populated_bytes() < limits_.capacity) return false;  // there is room, or will be
    if (!evict_one_orphan()) return false;
  }
}

Status Table::create(SessionId s, ObjectId id, uint64_t size, Location* out) {
  Session* n = find(s);
  if (!n || !id) return Status::kBad;
  if (objects_.contains(id)) return Status::kExists;
  if (size > limits_.capacity) return Status::kTooLarge;
  Object o;
  o.creator = s;
  o.size = size;
  o.birth = ++births_;
  if (!allocate(o)) return Status::kFull;
  *out = {o.arena, o.offset, o.size, nullptr};
  n->leases.insert(id);
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
  }
  add_claim(s, key, handover, ids);
  return Status::kOk;
}

Status Table::put_inline(SessionId s, ObjectId id, std::string_view bytes, const ClaimKey& key, bool handover) {
  if (!find(s) || !id || key.kind == uint32_t(ClaimKind::kNone) || bytes.size() > kInlineMax) return Status::kBad;
  if (objects_.contains(id)) return Status::kExists;
  if (inline_used_ + bytes.size() > limits_.inline_budget) return Status::kFull;
  Object o;
  o.sealed = true;
  o.creator = s;
  o.size = bytes.size();
  o.birth = ++births_;
  o.inlined = bytes;
  inline_used_ += bytes.size();
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

Status Table::get(SessionId s, ObjectId id, Location* out) {
  Session* n = find(s);
  if (!n) return Status::kBad;
  if (presence(id) != Presence::kReadable) return Status::kMissing;
  Object& o = objects_.at(id);
  ++counters_.gets;
  *out = {o.arena, o.offset, o.size, nullptr};
  if (o.node == PageAllocator::kNil) {
    out->inlined = &o.inlined;
    return Status::kInline;
  }
  ++o.pins;
  ++n->pins[id];
  return Status::kOk;
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
  objects_.at(id).pins -= n;
  maybe_drop(id);
}

void Table::remove(ObjectId id) {
  auto it = objects_.find(id);
  if (it == objects_.end() || !it->second.sealed || it->second.removed) return;
  it->second.removed = true;
  effects_.changed.push_back(id);
  ClaimKey self{uint32_t(ClaimKind::kSelf)};
  std::memcpy(self.bytes, &id, sizeof id);
  if (auto c = claims_.find(self); c != claims_.end()) end_claim(c);  // whoever freed it
  maybe_drop(id);
}

void Table::maybe_drop(ObjectId id) {
  auto it = objects_.find(id);
  if (it == objects_.end()) return;
  const Object& o = it->second;
  if (o.sealed && o.pins == 0 && (o.claims == 0 || o.removed)) drop(it);
}

void Table::drop(ObjectIt it) {
  Object& o = it->second;
  if (o.node != PageAllocator::kNil) {
    arenas_[o.arena].free(o.node);
    used_ -= o.pages * kPageSize;
    effects_.freed = true;
  } else {
    inline_used_ -= o.size;
  }
  effects_.changed.push_back(it->first);
  objects_.erase(it);
}

// ---- claims

void Table::add_claim(SessionId s, const ClaimKey& key, bool handover, const std::vector<ObjectId>& ids) {
  auto [it, fresh] = claims_.try_emplace(key);
  Claim& c = it->second;
  for (ObjectId id : ids) {
    Object& o = objects_.at(id);
    const std::pair claimed(id, o.birth);
    if (std::find(c.objects.begin(), c.objects.end(), claimed) != c.objects.end()) continue;
    c.objects.push_back(claimed);
    ++o.claims;
  }
  if (!fresh) return;  // a retried task claims again for the return it already has
  c.creator = s;
  c.handover = handover;
  if (key.kind == uint32_t(ClaimKind::kReturn)) ask(it, false);
  else set_owner(it, s);
}

void Table::set_owner(ClaimIt it, SessionId s) {
  Claim& c = it->second;
  for (SessionId w : c.waiting)
    if (Session* n = find(w)) n->queried.erase(it->first);
  c.waiting.clear();
  if (c.orphan) orphans_.erase(*c.orphan), c.orphan.reset();
  c.owner = s;
  find(s)->claims.insert(it->first);
}

void Table::ask(ClaimIt it, bool everyone) {
  Claim& c = it->second;
  auto query = [&](SessionId s, Session& n) {
    if (!n.listens || !c.asked.insert(s).second) return;
    c.waiting.insert(s);
    n.queried.insert(it->first);
    effects_.queries.emplace_back(s, it->first);
  };
  if (!everyone) {
    Session* creator = find(c.creator);
    Session* likely = creator ? find(creator->last_owner) : nullptr;
    if (likely) query(creator->last_owner, *likely);
  }
  if (c.waiting.empty())
    for (auto& [s, n] : sessions_) query(s, n);
  if (!c.waiting.empty()) return;
  if (c.inherited) end_claim(it);
  else c.orphan = orphans_.insert(orphans_.end(), it->first);
}

// `s` will not take the claim: ask on, or give up when nobody is left.
void Table::answered(ClaimIt it, SessionId s) {
  Claim& c = it->second;
  if (!c.waiting.erase(s)) return;
  if (Session* n = find(s)) n->queried.erase(it->first);
  if (c.waiting.empty()) ask(it, true);
}

void Table::adopt(SessionId s, const ClaimKey& key) {
  auto it = claims_.find(key);
  if (it == claims_.end() || it->second.owner || !it->second.asked.contains(s) || !find(s)) return;
  it->second.inherited = it->second.handover;
  set_owner(it, s);
  if (Session* creator = find(it->second.creator)) creator->last_owner = s;
}

void Table::disown(SessionId s, const ClaimKey& key, bool mine) {
  auto it = claims_.find(key);
  if (it == claims_.end() || it->second.owner || !it->second.asked.contains(s)) return;
  if (mine) end_claim(it);
  else answered(it, s);
}

void Table::unclaim(SessionId s, const ClaimKey& key) {
  auto it = claims_.find(key);
  if (it == claims_.end()) return;
  Claim& c = it->second;
  // The owner of a return may see it go before its adoption arrives here.
  if (c.owner != s && !(c.owner == 0 && c.asked.contains(s))) return;
  if (c.handover && s != c.creator) {  // an heir is done with it; another may still refer to it
    if (!c.owner) return answered(it, s);
    if (Session* n = find(s)) n->claims.erase(key);
    c.owner = 0;
    c.asked = {s};
    ask(it, true);
    return;
  }
  end_claim(it);
}

void Table::end_claim(ClaimIt it) {
  Claim c = std::move(it->second);
  const ClaimKey key = it->first;
  if (c.orphan) orphans_.erase(*c.orphan);
  claims_.erase(it);
  if (Session* n = find(c.owner)) n->claims.erase(key);
  for (SessionId w : c.waiting)
    if (Session* n = find(w)) n->queried.erase(key);
  for (const auto& claimed : c.objects) {
    if (Object* o = find(claimed)) {
      --o->claims;
      maybe_drop(claimed.first);
    }
  }
}

bool Table::evict_one_orphan() {
  for (const ClaimKey& key : orphans_) {
    auto it = claims_.find(key);
    const bool frees = std::any_of(it->second.objects.begin(), it->second.objects.end(), [&](const auto& claimed) {
      const Object* o = find(claimed);
      return o && o->node != PageAllocator::kNil && o->pins == 0 && o->claims == 1;
    });
    if (!frees) continue;
    ++counters_.orphans_dropped;
    end_claim(it);
    return true;
  }
  return false;
}

// ---- telling

std::string Table::why_full(uint64_t size) const {
  uint64_t free = 0, largest = 0;
  for (const auto& a : arenas_) free += a.free_pages() * kPageSize, largest = std::max(largest, a.largest_free() * kPageSize);
  std::string out = "need " + human(size) + "; capacity " + human(limits_.capacity) + ", used " + human(used_) + ", free " + human(free) +
                    " (largest extent " + human(largest) + ")";
  std::unordered_map<SessionId, std::pair<uint64_t, uint64_t>> held;  // claimed or leased, pinned
  for (const auto& [key, c] : claims_)
    for (const auto& [id, birth] : c.objects)
      if (auto o = objects_.find(id); o != objects_.end() && o->second.birth == birth) held[c.owner].first += o->second.size;
  for (const auto& [s, n] : sessions_) {
    for (ObjectId id : n.leases) held[s].first += objects_.at(id).size;
    for (const auto& [id, k] : n.pins) held[s].second += objects_.at(id).size;
  }
  std::vector<std::pair<SessionId, std::pair<uint64_t, uint64_t>>> rows(held.begin(), held.end());
  std::sort(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.second.first + a.second.second > b.second.first + b.second.second; });
  const size_t shown = std::min<size_t>(rows.size(), 5);
  for (size_t i = 0; i < shown; ++i) {
    auto s = sessions_.find(rows[i].first);
    out += "; ";
    out += s == sessions_.end() ? "returns nobody answers for yet" : s->second.label + " (pid " + std::to_string(s->second.pid) + ")";
    out += " owns " + human(rows[i].second.first) + " and reads " + human(rows[i].second.second);
  }
  if (rows.size() > shown) out += "; and " + std::to_string(rows.size() - shown) + " more";
  return out;
}

std::string Table::stats_json() const {
  uint64_t leases = 0, pins = 0, readable = 0, removed = 0, free_pages = 0, pinned_bytes = 0, waiting = 0;
  for (const auto& [id, o] : objects_) {
    pins += o.pins;
    readable += o.sealed && !o.removed;
    removed += o.removed;
    if (o.pins) pinned_bytes += o.size;
  }
  for (const auto& a : arenas_) free_pages += a.free_pages();
  for (const auto& [key, c] : claims_) waiting += !c.waiting.empty();
  std::string rows;
  for (const auto& [s, n] : sessions_) {
    leases += n.leases.size();
    uint64_t sp = 0;
    for (const auto& [id, k] : n.pins) sp += k;
    if (rows.size() > kMaxMessage / 2) continue;  // the reply is one message
    if (!rows.empty()) rows += ",";
    rows += "{\"session\":" + std::to_string(s) + ",\"pid\":" + std::to_string(n.pid) + ",\"label\":" + quoted(n.label) +
            ",\"listens\":" + (n.listens ? "true" : "false") + ",\"leases\":" + std::to_string(n.leases.size()) +
            ",\"pins\":" + std::to_string(sp) + ",\"claims\":" + std::to_string(n.claims.size()) + "}";
  }
  auto field = [](const char* k, uint64_t v) { return "\"" + std::string(k) + "\":" + std::to_string(v) + ","; };
  return "{" + field("capacity_bytes", limits_.capacity) + field("populated_bytes", populated_bytes()) + field("used_bytes", used_) +
         field("inline_bytes", inline_used_) + field("free_pages", free_pages) + field("objects", readable) + field("removed_but_pinned", removed) +
         field("pinned_bytes", pinned_bytes) + field("leases", leases) + field("pins", pins) + field("claims", claims_.size()) +
         field("claims_unanswered", waiting) + field("orphans", orphans_.size()) + field("puts", counters_.puts) + field("gets", counters_.gets) +
         field("bytes_put", counters_.bytes_put) + field("reaped_sessions", counters_.reaped_sessions) +
         field("reaped_leases", counters_.reaped_leases) + field("reaped_pins", counters_.reaped_pins) +
         field("orphans_dropped", counters_.orphans_dropped) + "\"sessions\":[" + rows + "]}";
}

}  // namespace mcr
