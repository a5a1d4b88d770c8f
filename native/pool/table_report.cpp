// What the table tells people: JSON, and why a put found no room.
#include <iterator>
#include <algorithm>
#include <cstdio>

#include "json.h"
#include "table.h"

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

std::string hex(const void* p, size_t n) {
  std::string out;
  char two[3];
  for (size_t i = 0; i < n; ++i) std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(p)[i]), out += two;
  return out;
}

std::string seconds(int64_t ns) {
  char buf[32];
  std::snprintf(buf, sizeof buf, "%.3f", double(ns) / 1e9);
  return buf;
}

}  // namespace

std::unordered_map<SessionId, Table::Held> Table::held() const {
  std::unordered_map<SessionId, Held> out;
  for (const auto& [key, c] : claims_)
    for (const auto& claimed : c.objects)
      if (const Object* o = find(claimed)) out[c.owner].owned += o->size;
  for (const auto& [s, n] : sessions_) {
    for (ObjectId id : n.leases) out[s].leased += objects_.at(id).size;
    for (const auto& [id, k] : n.pins) out[s].pinned += objects_.at(id).size;
  }
  return out;
}

std::string Table::why_full(uint64_t size, SessionId who) const {
  uint64_t largest = 0;
  for (const auto& a : arenas_) largest = std::max(largest, a.largest_free() * kPageSize);
  std::string out = "need " + human(size) + "; capacity " + human(limits_.capacity) + ", used " + human(usage_.used) + ", free " + human(free_bytes()) +
                    " (largest extent " + human(largest) + ")";
  if (auto s = sessions_.find(who); limits_.quota && s != sessions_.end()) {
    const Group& g = groups_[s->second.group];
    out += "; group " + (g.name.empty() ? "without a name" : g.name) + " has " + human(g.usage.used) + " of its quota of " + human(limits_.quota);
  }
  if (limits_.disk) out += "; " + human(disk_used_) + " on disk";
  if (!disk_error_.empty()) out += "; nothing can be spilled: " + disk_error_;
  const auto all = held();
  std::vector<std::pair<SessionId, Held>> rows(all.begin(), all.end());
  auto weight = [](const Held& h) { return h.owned + h.leased + h.pinned; };
  std::sort(rows.begin(), rows.end(), [&](auto& a, auto& b) { return weight(a.second) > weight(b.second); });
  const size_t shown = std::min<size_t>(rows.size(), 5);
  for (size_t i = 0; i < shown; ++i) {
    auto s = sessions_.find(rows[i].first);
    out += "; ";
    out += s == sessions_.end() ? "returns nobody answers for yet" : s->second.label + " (pid " + std::to_string(s->second.pid) + ")";
    out += " owns " + human(rows[i].second.owned + rows[i].second.leased) + " and reads " + human(rows[i].second.pinned);
  }
  if (rows.size() > shown) out += "; and " + std::to_string(rows.size() - shown) + " more";
  return out;
}

std::string Table::session_rows(bool all) const {
  const auto sums = all ? held() : std::unordered_map<SessionId, Held>();
  Json rows;
  for (const auto& [s, n] : sessions_) {
    if (!all && rows.text.size() > kMaxMessage / 2) break;  // the reply is one message
    uint64_t pins = 0;
    for (const auto& [id, k] : n.pins) pins += k;
    Json row;
    row.add("session", s).add("pid", uint64_t(n.pid)).add("label", n.label).add("group", groups_[n.group].name).add("listens", n.listens);
    row.add("leases", n.leases.size()).add("pins", pins).add("claims", n.claims.size()).raw("age_s", seconds(now_ - n.since));
    if (all) {
      auto h = sums.find(s);
      const Held sum = h == sums.end() ? Held{} : h->second;
      row.add("leased_bytes", sum.leased).add("pinned_bytes", sum.pinned).add("owned_bytes", sum.owned);
    }
    rows.object("", row);
  }
  return rows.text;
}

std::string Table::object_rows() const {
  std::unordered_map<ObjectId, Json> pins, claims;
  for (const auto& [s, n] : sessions_)
    for (const auto& [id, k] : n.pins) pins[id].object("", Json().add("session", s).add("count", k));
  static constexpr const char* kKinds[] = {"none", "token", "return", "self", "replica"};
  for (const auto& [key, c] : claims_)
    for (const auto& claimed : c.objects)
      if (find(claimed))
        claims[claimed.first].object(
            "", Json().add("kind", std::string(key.kind < std::size(kKinds) ? kKinds[key.kind] : "unknown")).add("key", hex(key.bytes, sizeof key.bytes)).add("owner", c.owner));
  Json rows;
  for (const auto& [id, o] : objects_) {
    const char* state = o.removed             ? "removed"
                        : o.is_inline()       ? "inline"
                        : !o.sealed           ? "leased"
                        : o.io == Io::kWriting ? "spilling"
                        : o.io == Io::kReading ? "restoring"
                        : o.in_memory()       ? "resident"
                                              : "spilled";
    auto creator = sessions_.find(o.creator);
    Json row;
    row.add("id", hex(&id, sizeof id)).add("size", o.size).add("state", std::string(state)).add("clean", o.in_memory() && o.on_disk());
    row.raw("age_s", seconds(now_ - o.since)).add("creator", o.creator);
    row.add("creator_pid", uint64_t(creator == sessions_.end() ? 0 : creator->second.pid));
    row.add("creator_label", creator == sessions_.end() ? std::string() : creator->second.label);
    row.add("group", groups_[o.group].name).add("note", o.note).list("pins", pins[id]).list("claims", claims[id]);
    rows.object("", row);
  }
  return rows.text;
}

std::string Table::report(bool detail) const {
  uint64_t leases = 0, pins = 0, readable = 0, removed = 0, pinned_bytes = 0, waiting = 0, spilled = 0, spilled_bytes = 0;
  for (const auto& [id, o] : objects_) {
    pins += o.pins;
    leases += !o.sealed;
    readable += o.sealed && !o.removed;
    removed += o.removed;
    if (o.pins) pinned_bytes += o.size;
    if (o.on_disk() && !o.in_memory()) ++spilled, spilled_bytes += o.bytes();
  }
  SessionId first_listener = 0;
  for (const auto& [s, n] : sessions_)
    if (n.listens && !first_listener) first_listener = s;
  for (const auto& [key, c] : claims_) waiting += !c.waiting.empty();
  Json out;
  out.add("capacity_bytes", limits_.capacity).add("populated_bytes", populated_bytes()).add("used_bytes", usage_.used);
  out.add("clean_bytes", usage_.clean).add("inline_bytes", inline_used_).add("free_pages", free_bytes() / kPageSize).add("objects", readable);
  out.add("removed_but_pinned", removed).add("pinned_bytes", pinned_bytes).add("leases", leases).add("pins", pins).add("claims", claims_.size());
  out.add("claims_unanswered", waiting).add("orphans", orphans_.size()).add("puts", counters_.puts).add("gets", counters_.gets);
  out.add("bytes_put", counters_.bytes_put).add("reaped_sessions", counters_.reaped_sessions).add("reaped_leases", counters_.reaped_leases);
  out.add("reaped_pins", counters_.reaped_pins).add("orphans_dropped", counters_.orphans_dropped);
  out.add("spilled_objects", spilled).add("spilled_bytes", spilled_bytes).add("disk_bytes", disk_used_).add("writing_bytes", usage_.writing);
  out.add("spill_written_bytes", counters_.spill_written_bytes).add("spill_read_bytes", counters_.spill_read_bytes);
  out.add("served_from_disk", counters_.served_from_disk).add("spill_error", disk_error_).add("quota_bytes", limits_.quota);
  out.add("first_listener", first_listener);
  Json groups;
  for (const Group& g : groups_)
    if (g.sessions || g.objects)
      groups.object("", Json().add("name", g.name).add("resident_bytes", g.usage.used).add("quota_bytes", limits_.quota));
  out.list("groups", groups).raw("sessions", "[" + session_rows(detail) + "]");
  if (detail) out.raw("object_rows", "[" + object_rows() + "]");
  return out.text;
}

}  // namespace mcr
