#include "journal.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <map>
#include <stdexcept>
#include <unordered_map>

namespace mcr {
namespace {

constexpr char kMagic[8] = {'M', 'C', 'R', 'J', 'R', 'N', 'L', '1'};
constexpr uint64_t kSmall = 4 << 20;  // bytes; below, a log is not worth writing anew
enum Kind : uint32_t { kSession = 1, kObject, kClaim, kNoSession, kNoObject, kNoClaim };

struct Head {
  uint32_t kind, bytes, crc;
};

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    t[i] = c;
  }
  return t;
}

// Of the head as well: a record of another kind would be worse than none.
uint32_t crc32(const Head& h, std::string_view body) {
  static constexpr auto kTable = crc_table();
  uint32_t c = ~0u;
  auto add = [&c](std::string_view s) {
    for (unsigned char b : s) c = kTable[(c ^ b) & 0xff] ^ (c >> 8);
  };
  add({reinterpret_cast<const char*>(&h), offsetof(Head, crc)});
  add(body);
  return ~c;
}

struct Writer {
  std::string out;
  template <class T>
  Writer& raw(const T& v) { return out.append(reinterpret_cast<const char*>(&v), sizeof v), *this; }
  Writer& text(std::string_view s) { return raw(uint32_t(s.size())), out.append(s), *this; }
};

struct Reader {
  std::string_view in;
  void need(size_t n) const {
    if (n > in.size()) throw std::runtime_error("a record of the journal is too short");
  }
  template <class T>
  Reader& raw(T* v) {
    need(sizeof *v);
    std::memcpy(v, in.data(), sizeof *v);
    in.remove_prefix(sizeof *v);
    return *this;
  }
  Reader& text(std::string* s) {
    uint32_t n;
    raw(&n).need(n);
    s->assign(in.substr(0, n));
    in.remove_prefix(n);
    return *this;
  }
};

void append(std::string& log, Kind kind, const Writer& w) {
  Head h{kind, uint32_t(w.out.size()), 0};
  h.crc = crc32(h, w.out);
  log.append(reinterpret_cast<const char*>(&h), sizeof h).append(w.out);
}

std::string contents_of(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw std::system_error(errno, std::generic_category(), path);
  struct stat st;
  if (::fstat(fd.get(), &st)) throw_errno("fstat");
  std::string text(size_t(st.st_size), '\0');
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::read(fd.get(), text.data() + at, text.size() - at);
    if (n < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), path);
    if (n == 0) text.resize(at);
    if (n > 0) at += size_t(n);
  }
  return text;
}

}  // namespace

Journal::Journal(std::string path, const uint8_t (&pool_id)[16], uint64_t generation) : path_(std::move(path)) {
  fd_.reset(::open((path_ + ".new").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
  if (!fd_) throw std::system_error(errno, std::generic_category(), path_);
  pending_.append(kMagic, sizeof kMagic).append(reinterpret_cast<const char*>(pool_id), sizeof pool_id);
  pending_.append(reinterpret_cast<const char*>(&generation), sizeof generation);
}

void Journal::put(const SavedSession& s) {
  append(pending_, kSession, Writer().raw(s.id).raw(s.pid).raw(s.born).text(s.label).text(s.group));
}

void Journal::put(const SavedObject& o) {
  append(pending_, kObject, Writer().raw(o.id).raw(o.creator).raw(o.size).raw(o.disk_page).text(o.group).text(o.note));
}

void Journal::put(const SavedClaim& c) {
  Writer w;
  w.raw(c.key).raw(c.owner).raw(c.creator).raw(uint8_t(c.handover)).raw(uint8_t(c.inherited)).raw(uint32_t(c.objects.size()));
  for (ObjectId id : c.objects) w.raw(id);
  append(pending_, kClaim, w);
}

void Journal::forget(SessionId s) { append(pending_, kNoSession, Writer().raw(s)); }
void Journal::forget(ObjectId id) { append(pending_, kNoObject, Writer().raw(id)); }
void Journal::forget(const ClaimKey& key) { append(pending_, kNoClaim, Writer().raw(key)); }

void Journal::write() {
  while (!pending_.empty()) {
    const ssize_t n = ::write(fd_.get(), pending_.data(), pending_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), path_);
    pending_.erase(0, size_t(n));
    written_ += uint64_t(n);
  }
}

void Journal::commit() {
  write();
  begun_with_ = written_;
  if (::rename((path_ + ".new").c_str(), path_.c_str())) throw std::system_error(errno, std::generic_category(), path_);
}

bool Journal::overgrown() const { return written_ > kSmall && written_ > 4 * begun_with_; }

Journal::Contents Journal::read(const std::string& path) {
  const std::string log = contents_of(path);
  Contents out;
  std::string_view rest = log;
  char magic[sizeof kMagic];
  Reader start{rest};
  start.raw(&magic).raw(&out.pool_id).raw(&out.generation);
  if (std::memcmp(magic, kMagic, sizeof magic)) throw std::runtime_error(path + " is not a journal of this version");
  std::map<SessionId, SavedSession> sessions;
  std::unordered_map<ObjectId, SavedObject> objects;
  std::unordered_map<ClaimKey, SavedClaim> claims;
  for (rest = start.in; rest.size() >= sizeof(Head);) {
    Head h;
    Reader(rest).raw(&h);
    if (h.bytes > rest.size() - sizeof h || crc32(h, rest.substr(sizeof h, h.bytes)) != h.crc) break;  // torn: its writer was killed
    Reader r{rest.substr(sizeof h, h.bytes)};
    rest.remove_prefix(sizeof h + h.bytes);
    SavedSession s;
    SavedObject o;
    SavedClaim c;
    uint8_t handover, inherited;
    uint32_t n;
    switch (h.kind) {
      case kSession:
        r.raw(&s.id).raw(&s.pid).raw(&s.born).text(&s.label).text(&s.group);
        sessions[s.id] = s;
        break;
      case kObject:
        r.raw(&o.id).raw(&o.creator).raw(&o.size).raw(&o.disk_page).text(&o.group).text(&o.note);
        objects[o.id] = o;
        break;
      case kClaim:
        r.raw(&c.key).raw(&c.owner).raw(&c.creator).raw(&handover).raw(&inherited).raw(&n);
        c.handover = handover;
        c.inherited = inherited;
        for (ObjectId id; n; --n) r.raw(&id), c.objects.push_back(id);
        claims[c.key] = c;
        break;
      case kNoSession:
        r.raw(&s.id);
        sessions.erase(s.id);
        break;
      case kNoObject:
        r.raw(&o.id);
        objects.erase(o.id);
        break;
      case kNoClaim:
        r.raw(&c.key);
        claims.erase(c.key);
        break;
      default:
        throw std::runtime_error(path + " has a record of an unknown kind");
    }
  }
  for (auto& [id, s] : sessions) out.sessions.push_back(std::move(s));
  for (auto& [id, o] : objects) out.objects.push_back(std::move(o));
  for (auto& [key, c] : claims) out.claims.push_back(std::move(c));
  return out;
}

}  // namespace mcr
