#include "tracker.h"

namespace mcr::peer {

bool Tracker::leads_to(const Object& o, const std::string& source, const std::string& me) {
  std::string at = source;
  for (size_t steps = 0; steps <= o.holders.size(); ++steps) {
    if (at == me) return true;
    const auto h = o.holders.find(at);
    if (h == o.holders.end() || !h->second.pulling) return false;
    at = h->second.from;
  }
  return true;
}

void Tracker::let_go(Object& o, Holder& h) {
  if (!h.pulling) return;
  h.pulling = false;
  if (auto s = o.holders.find(h.from); s != o.holders.end() && s->second.load) --s->second.load;
}

void Tracker::drop(Object& o, const std::string& who) {
  const auto h = o.holders.find(who);
  if (who.empty() || h == o.holders.end()) return;
  let_go(o, h->second);
  o.holders.erase(h);
  // Who reads from it will come back and say so, or is done; it counts for nobody meanwhile.
  for (auto& [_, other] : o.holders)
    if (other.pulling && other.from == who) other.pulling = false;
}

std::string Tracker::assign(ObjectId id, const std::string& me, const std::string& bad) {
  if (me.empty()) return "";
  Object& o = objects_[id];
  if (bad != me) drop(o, bad);
  Holder& mine = o.holders[me];
  let_go(o, mine);
  mine.complete = false;
  const std::pair<const std::string, Holder>* best = nullptr;
  for (const auto& h : o.holders) {
    if (h.first == me || (!h.second.complete && (!h.second.pulling || leads_to(o, h.first, me)))) continue;
    if (!best || h.second.load < best->second.load || (h.second.load == best->second.load && h.second.complete && !best->second.complete)) best = &h;
  }
  mine.pulling = true;
  mine.from = best->first;  // the home is always one
  ++o.holders[mine.from].load;
  return mine.from;
}

void Tracker::finish(ObjectId id, const std::string& me, bool kept) {
  const auto o = objects_.find(id);
  if (o == objects_.end() || me.empty()) return;
  const auto h = o->second.holders.find(me);
  if (h == o->second.holders.end()) return;
  let_go(o->second, h->second);
  if (kept) h->second.complete = true;
  else drop(o->second, me);
  if (o->second.holders.size() == 1) objects_.erase(o);
}

void Tracker::forget(const std::string& who) {
  if (who.empty()) return;
  for (auto o = objects_.begin(); o != objects_.end();) {
    drop(o->second, who);
    o = o->second.holders.size() == 1 ? objects_.erase(o) : std::next(o);
  }
}

uint32_t Tracker::load(ObjectId id, const std::string& source) const {
  const auto o = objects_.find(id);
  if (o == objects_.end()) return 0;
  const auto h = o->second.holders.find(source);
  return h == o->second.holders.end() ? 0 : h->second.load;
}

}  // namespace mcr::peer
