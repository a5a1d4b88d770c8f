// The broker: arenas, the disk, and what the table wants done.
#include <fcntl.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "broker.h"

extern char** environ;

namespace mcr {
namespace {

constexpr uint64_t kPopulateStep = 32 << 20;         // bytes; a step holds the arena's thread 10-20 ms
constexpr int64_t kRetryDisk = 5'000'000'000;        // ns until a disk that refused is tried again

}  // namespace

// ---- arenas

void Broker::add_arena(uint64_t bytes, int node) {
  arenas_.push_back(std::make_unique<Arena>(bytes, kPopulateStep, config_.huge_pages, node));
  table_.add_arena(node);
  watch(arenas_.back()->progress_fd(), EPOLLIN, EPOLL_CTL_ADD);
}

// Populated memory stays ahead of what is used, so that an allocation never waits for the kernel to clear pages. Where the arenas there are
// end, a further one begins.
void Broker::grow() {
  uint64_t size = 0, largest = 0;
  for (auto& a : arenas_) size += a->size(), largest = std::max(largest, a->size());
  const uint64_t capacity = table_.limits().capacity, left = capacity - std::min(capacity, size);
  uint64_t wanted = 0;  // by the create that waits longest
  if (!parking_.creates().empty()) wanted = parking_.find(parking_.creates().front())->request.size;
  int fullest = config_.nodes.front();
  uint64_t lacking = 0;
  for (int node : config_.nodes) {
    const uint64_t used = table_.used_bytes(node);
    uint64_t want = used + used / 4 + config_.prefault / config_.nodes.size();
    if (wanted) want = std::max(want, table_.populated_bytes() + wanted + kPopulateStep);
    for (auto& a : arenas_) {
      if (a->node() != node) continue;
      a->want(want);
      want -= std::min(want, a->size());
    }
    if (want > lacking) lacking = want, fullest = node;
  }
  if (left < kPageSize || (!lacking && wanted <= largest)) return;
  const uint64_t bytes = std::min(left, std::max(config_.arena, whole_pages(wanted)));
  try {
    add_arena(bytes, fullest);
  } catch (const std::system_error& e) {
    std::fprintf(stderr, "mooncake-broker: no further arena of %llu bytes: %s\n", static_cast<unsigned long long>(bytes), e.what());
    return table_.set_capacity(size);
  }
  grow();  // now that it is there, populate it
}

// Bytes of the largest object that the arenas can hold: those there are, and the one that the rest of the capacity could become.
uint64_t Broker::largest_extent() const {
  uint64_t size = 0, largest = 0;
  for (auto& a : arenas_) size += a->size(), largest = std::max(largest, a->size());
  return std::max(largest, table_.limits().capacity - std::min(table_.limits().capacity, size));
}

void Broker::arena_progress(int fd) {
  for (uint32_t a = 0; a < arenas_.size(); ++a) {
    if (arenas_[a]->progress_fd() != fd) continue;
    if (uint64_t more = arenas_[a]->drain()) table_.extend(a, more);
    if (arenas_[a]->failed()) table_.stop_growing();
  }
}

// ---- what the table wants done

void Broker::apply_effects() {
  for (;;) {
    Table::Effects fx = table_.take_effects();
    if (journal_) write_journal(fx.saved);  // first: what is overwritten next must not be found by another broker
    if (spill_)
      for (auto& [offset, bytes] : fx.holes) spill_->submit({SpillFile::Job::kPunch, {}, nullptr, offset, bytes, {}});
    const std::string refused = fx.writes.empty() ? "" : open_spill();
    for (auto& t : fx.writes) {
      if (!refused.empty()) table_.written(t.id, refused);
      else spill_->submit({SpillFile::Job::kWrite, t.id, arenas_[t.arena]->data() + t.offset, t.disk, t.bytes, {}});
    }
    for (auto& t : fx.reads) spill_->submit({SpillFile::Job::kRead, t.id, arenas_[t.arena]->data() + t.offset, t.disk, t.bytes, {}});
    for (auto& [s, key] : fx.queries) push_event(s, key);
    for (auto& [s, key] : fx.answers) push_event(s, key);
    for (auto& [s, id] : fx.gone) {
      ClaimKey key{uint32_t(ClaimKind::kGone)};
      std::memcpy(key.bytes, &id, sizeof id);
      push_event(s, key);
    }
    for (ObjectId id : fx.changed)
      for (uint64_t serial : parking_.waiting_for(id))
        if (const Parked* p = parking_.find(serial); p && try_wait(*p, false)) unpark(serial);
    if (fx.freed) serve_creates();
    if (fx.queries.empty() && fx.changed.empty() && !fx.freed && fx.writes.empty() && fx.holes.empty()) return;
  }
}

// ---- the disk

void Broker::make_room() {
  const int64_t now = now_ns();
  if (retry_disk_ && now >= retry_disk_) {
    retry_disk_ = 0;
    table_.spill_again();
    if (spill_ && !journal_) begin_journal();
  }
  std::vector<uint32_t> seen;
  table_.make_room(0);
  for (uint64_t serial : parking_.creates()) {
    const Parked& p = *parking_.find(serial);
    const SessionId s = conns_.at(p.fd).session;
    if (std::find(seen.begin(), seen.end(), table_.group(s)) != seen.end()) continue;
    seen.push_back(table_.group(s));
    table_.make_room(p.request.size, s);
    if (!table_.limits().quota) break;
  }
  if ((table_.disk_refuses() || (spill_ && !journal_)) && !retry_disk_) retry_disk_ = now + kRetryDisk;
}

// Makes the directory, the file and the journal on first use.
std::string Broker::open_spill() {
  if (spill_) return "";
  try {
    if (!directory_.taken()) directory_.take();
    spill_ = std::make_unique<SpillFile>(directory_.data(), config_.disk_reserve);
    watch(spill_->done_fd(), EPOLLIN, EPOLL_CTL_ADD);
  } catch (const std::exception& e) {
    spill_.reset();
    directory_.remove();
    return e.what();
  }
  begin_journal();
  start_janitor();
  return "";
}

void Broker::spill_progress() {
  for (SpillFile::Job& job : spill_->done()) {
    if (job.kind == SpillFile::Job::kWrite) table_.written(job.id, job.error);
    else table_.read_back(job.id, job.error);
  }
}

// Processes that are yet to come back find what is theirs with another broker.
void Broker::leave_disk() {
  const bool needed = !stopping_ && journal_ && std::any_of(peers_.begin(), peers_.end(), [](auto& p) { return p.second.away; });
  spill_.reset();
  journal_.reset();
  if (!needed) directory_.remove();
}

// Whoever kills the broker kills who would have removed its files.
void Broker::start_janitor() {
  if (config_.janitor.empty()) return;
  std::string pid = std::to_string(::getpid()), path = directory_.path(), name = "mooncake-janitor", option = "--clean-up-after";
  char* argv[] = {name.data(), option.data(), pid.data(), path.data(), nullptr};
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  pid_t child;
  if (const int e = ::posix_spawn(&child, config_.janitor.c_str(), nullptr, &attributes, argv, environ))
    std::fprintf(stderr, "mooncake-broker: no janitor for %s: %s\n", path.c_str(), std::strerror(e));
  ::posix_spawnattr_destroy(&attributes);
}

// ---- the journal

void Broker::note(const Table::Names& names) {
  auto each = [&](const auto& changed) {
    for (const auto& name : changed) {
      if (auto there = table_.saved(name)) journal_->put(*there);
      else journal_->forget(name);
    }
  };
  each(names.sessions);
  each(names.objects);
  each(names.claims);
}

void Broker::begin_journal() {
  try {
    journal_ = std::make_unique<Journal>(directory_.journal(), pool_id_, generation_);
    note(table_.all_saved());
    journal_->commit();
  } catch (const std::system_error& e) {
    give_up_journal(e);
  }
}

void Broker::write_journal(const Table::Names& changed) {
  note(changed);
  try {
    journal_->write();
  } catch (const std::system_error& e) {
    return give_up_journal(e);
  }
  if (journal_->overgrown()) begin_journal();
}

// What it says would no longer be true. Without it, what is on disk ends with this broker.
void Broker::give_up_journal(const std::system_error& e) {
  std::fprintf(stderr, "mooncake-broker: no journal any more: %s\n", e.what());
  ::unlink(directory_.journal().c_str());
  journal_.reset();
}

// Takes over what a killed broker left.
void Broker::recover() {
  if (!directory_.exists()) return;
  Journal::Contents left;
  try {
    directory_.take();
    left = Journal::read(directory_.journal());
    spill_ = std::make_unique<SpillFile>(directory_.data(), config_.disk_reserve);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mooncake-broker: nothing taken over from %s: %s\n", directory_.path().c_str(), e.what());
    spill_.reset();
    return directory_.remove();
  }
  for (const SavedSession& s : left.sessions) table_.restore(s);
  for (const SavedObject& o : left.objects) table_.restore(o);
  for (const SavedClaim& c : left.claims) table_.restore(c);
  table_.restored();
  spill_->truncate(table_.disk_end());
  const bool any = !table_.is_empty();
  for (const SavedSession& s : left.sessions) {
    Peer p;
    p.pid = s.pid;
    p.away = true;
    Fd pidfd = pidfd_of(s.pid);
    const bool comes_back = any && table_.owns_anything(s.id) && s.born && process_start(s.pid) == s.born;
    if (comes_back && watch_process(s.id, p, std::move(pidfd))) peers_.emplace(s.id, std::move(p));
    else table_.close_session(s.id);
  }
  if (table_.is_empty()) {
    for (auto& [s, p] : std::exchange(peers_, {})) by_pidfd_.erase(p.pidfd.get()), table_.close_session(s);
    return leave_disk();
  }
  std::memcpy(pool_id_, left.pool_id, sizeof pool_id_);
  generation_ = left.generation + 1;
  watch(spill_->done_fd(), EPOLLIN, EPOLL_CTL_ADD);
  begin_journal();
  start_janitor();
  apply_effects();
}

}  // namespace mcr
