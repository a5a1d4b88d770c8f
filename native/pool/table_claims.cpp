// The table's claims: who keeps what, and who is asked whose it is.
#include <algorithm>

#include "table.h"

namespace mcr {
namespace {

// A session need not be asked for claims that are its own.
bool is_asked_for(const ClaimKey& key) { return key.kind == uint32_t(ClaimKind::kToken) || key.kind == uint32_t(ClaimKind::kReturn); }

ClaimKey with(ClaimKey key, Answer answer) {
  key.kind |= uint32_t(answer);
  return key;
}

}  // namespace

void Table::listen(SessionId s, bool on, bool last) {
  Session* n = find(s);
  if (!n || n->listens == on) return;
  n->listens = on;
  n->asked_last = last;
  if (!on) {
    for (const ClaimKey& key : std::exchange(n->queried, {}))
      if (auto c = claims_.find(key); c != claims_.end()) answered(c, s);
    return;
  }
  // What is left of a dead broker: its owner may have told that one that it is over, and an orphan's owner may be back.
  for (auto it = claims_.begin(); it != claims_.end(); ++it)
    if (it->second.restored && (it->second.owner == s || !it->second.owner) && is_asked_for(it->first)) query(it, s, *n);
}

void Table::add_claim(SessionId s, const ClaimKey& key, bool handover, const std::vector<ObjectId>& ids) {
  auto [it, fresh] = claims_.try_emplace(key);
  Claim& c = it->second;
  for (ObjectId id : ids) {
    Object& o = objects_.at(id);
    const std::pair claimed(id, o.birth);
    if (std::find(c.objects.begin(), c.objects.end(), claimed) != c.objects.end()) continue;
    c.objects.push_back(claimed);
    count_claim(key, id, o, 1);
  }
  touch(key);
  if (!fresh) return;  // a retried task claims again for the return it already has
  c.creator = s;
  c.handover = handover;
  if (key.kind == uint32_t(ClaimKind::kReturn)) ask(it, false);
  else set_owner(it, s);
}

void Table::count_claim(const ClaimKey& key, ObjectId id, Object& o, int more) {
  o.claims += uint64_t(int64_t(more));
  if (key.kind == uint32_t(ClaimKind::kReplica)) o.replicas += uint64_t(int64_t(more));
  settle(id, o);
}

void Table::set_owner(ClaimIt it, SessionId s) {
  Claim& c = it->second;
  for (SessionId w : c.waiting)
    if (Session* n = find(w)) n->queried.erase(it->first);
  c.waiting.clear();
  if (c.orphan) orphans_.erase(*c.orphan), c.orphan.reset();
  c.owner = s;
  c.restored = false;
  find(s)->claims.insert(it->first);
  touch(it->first);
  if (c.inquirer) effects_.answers.emplace_back(c.inquirer, with(it->first, Answer::kHeld));
}

void Table::query(ClaimIt it, SessionId s, Session& n) {
  if (!n.listens || !it->second.asked.insert(s).second) return;
  it->second.waiting.insert(s);
  n.queried.insert(it->first);
  effects_.queries.emplace_back(s, it->first);
}

void Table::query_all(ClaimIt it, bool last) {
  for (auto& [s, n] : sessions_)
    if (n.asked_last == last) query(it, s, n);
}

void Table::ask(ClaimIt it, bool everyone) {
  Claim& c = it->second;
  if (!everyone) {
    Session* creator = find(c.creator);
    Session* likely = creator ? find(creator->last_owner) : nullptr;
    if (likely) query(it, creator->last_owner, *likely);
  }
  if (c.waiting.empty()) query_all(it, false);
  if (!c.waiting.empty()) return;
  tell_inquirer(it, Answer::kNobody);
  if (c.objects.empty()) return end_claim(it);
  query_all(it, true);
  if (!c.waiting.empty()) return;
  if (c.inherited && !c.restored) end_claim(it);  // of those that a restored claim is for, some may not be back yet
  else if (!c.orphan) c.orphan = orphans_.insert(orphans_.end(), it->first);
}

// `s` will not take the claim: ask on, or give up when nobody is left.
void Table::answered(ClaimIt it, SessionId s) {
  Claim& c = it->second;
  if (!c.waiting.erase(s)) return;
  if (Session* n = find(s)) n->queried.erase(it->first);
  if (c.owner) return;
  if (c.waiting.empty()) ask(it, true);
  else if (waits_only_for(c, c.inquirer)) tell_inquirer(it, Answer::kNobody);
}

void Table::adopt(SessionId s, const ClaimKey& key) {
  auto it = claims_.find(key);
  if (it == claims_.end() || !find(s)) return;
  Claim& c = it->second;
  if ((c.owner && !(c.restored && c.owner == s)) || !c.asked.contains(s)) return;
  if (c.owner != s) c.inherited = c.handover;
  set_owner(it, s);
  if (Session* creator = find(c.creator)) creator->last_owner = s;
}

void Table::disown(SessionId s, const ClaimKey& key, bool mine) {
  auto it = claims_.find(key);
  if (it == claims_.end()) return;
  const Claim& c = it->second;
  if (!c.asked.contains(s)) return;
  if (c.owner == s && c.restored) unclaim(s, key);
  else if (c.owner) return;
  else if (mine) end_claim(it);
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
    if (Session* n = find(s)) n->claims.erase(key), n->queried.erase(key);
    c.owner = 0;
    c.asked = {s};
    if (c.inquirer) c.asked.insert(c.inquirer);
    c.waiting.clear();
    touch(key);
    ask(it, true);
    return;
  }
  end_claim(it);
}

void Table::inquire(SessionId s, const ClaimKey& key) {
  if (!find(s) || !is_asked_for(key)) return;
  auto [it, fresh] = claims_.try_emplace(key);
  Claim& c = it->second;
  c.inquirer = s;
  inquiries_.insert(key);
  if (!fresh && c.owner) {
    effects_.answers.emplace_back(s, with(key, Answer::kHeld));
    return;
  }
  c.asked.insert(s);
  if (fresh) {
    c.creator = s;
    c.handover = key.kind == uint32_t(ClaimKind::kToken);  // any that refers to it keeps it
    return ask(it, false);
  }
  query_all(it, false);  // it may be about to be asked itself, for a claim of this broker's own
  if (c.waiting.empty() || waits_only_for(c, s)) tell_inquirer(it, Answer::kNobody);
}

// Its last answer, as far as it is concerned.
void Table::tell_inquirer(ClaimIt it, Answer answer) {
  const SessionId s = std::exchange(it->second.inquirer, 0);
  if (!s) return;
  inquiries_.erase(it->first);
  effects_.answers.emplace_back(s, with(it->first, answer));
}

void Table::end_claim(ClaimIt it) {
  tell_inquirer(it, Answer::kEnded);
  Claim c = std::move(it->second);
  const ClaimKey key = it->first;
  if (c.orphan) orphans_.erase(*c.orphan);
  claims_.erase(it);
  touch(key);
  if (Session* n = find(c.owner)) n->claims.erase(key);
  for (SessionId w : c.waiting)
    if (Session* n = find(w)) n->queried.erase(key);
  for (const auto& claimed : c.objects) {
    if (Object* o = find(claimed)) {
      count_claim(key, claimed.first, *o, -1);
      maybe_drop(claimed.first);
    }
  }
}

}  // namespace mcr
