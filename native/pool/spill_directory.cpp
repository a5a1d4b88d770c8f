#include "spill_directory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "journal.h"

namespace mcr {
namespace {

namespace fs = std::filesystem;
constexpr int kLookMs = 1000;   // between a janitor's looks
constexpr int kLockTries = 1000;  // a millisecond each: a janitor holds the lock while it looks, a dying broker while it dies

void rest_ms(int ms) {
  const timespec t{ms / 1000, ms % 1000 * 1'000'000};
  ::nanosleep(&t, nullptr);
}

// The lock of a directory if nobody has it. Empty otherwise; errno says why: EWOULDBLOCK, and ENOENT where the directory is being removed,
// may pass.
Fd try_lock(const std::string& path, int flags = 0) {
  Fd fd(::open((path + "/lock").c_str(), O_RDWR | O_CLOEXEC | flags, 0600));
  if (!fd || ::flock(fd.get(), LOCK_EX | LOCK_NB)) return Fd();
  struct stat mine, there;  // it may be of a directory that was removed, and made again
  if (!::fstat(fd.get(), &mine) && !::stat((path + "/lock").c_str(), &there) && mine.st_ino == there.st_ino) return fd;
  fd.reset();
  errno = ENOENT;
  return fd;
}

// With its lock held: whether a process lives that may come back for what is there.
bool needed(const std::string& path) {
  try {
    const auto all = Journal::read(path + "/journal");
    return !all.objects.empty() && std::any_of(all.sessions.begin(), all.sessions.end(), [](const SavedSession& s) {
      return s.born && process_start(s.pid) == s.born;
    });
  } catch (const std::exception&) {
    return false;  // no broker could make anything of it
  }
}

void private_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) && errno != EEXIST) throw std::system_error(errno, std::generic_category(), path);
  struct stat st;
  if (::lstat(path.c_str(), &st)) throw std::system_error(errno, std::generic_category(), path);
  if (!S_ISDIR(st.st_mode) || st.st_uid != ::geteuid() || st.st_mode & 022)
    throw std::runtime_error(path + " must be a directory of this user that nobody else can write to");
}

// With the directory above it, if that is empty then.
void erase(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
  fs::remove(fs::path(path).parent_path(), ignored);
}

}  // namespace

uint64_t process_start(pid_t pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  Fd fd(pid > 0 ? ::open(path, O_RDONLY | O_CLOEXEC) : -1);
  if (!fd) return 0;
  const ssize_t n = ::read(fd.get(), text, sizeof text - 1);
  if (n <= 0) return 0;
  text[n] = '\0';
  const char* at = std::strrchr(text, ')');  // the name may hold anything
  if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
  for (int field = 2; field < 22; ++field)
    if (!(at = std::strchr(at + 1, ' '))) return 0;
  return std::strtoull(at, nullptr, 10);
}

bool SpillDirectory::exists() const { return ::access(path_.c_str(), F_OK) == 0; }

void SpillDirectory::take() {
  const fs::path parent = fs::path(path_).parent_path();
  std::error_code ignored;
  fs::create_directories(parent.parent_path(), ignored);
  for (int tries = 0;; ++tries) {
    try {
      private_directory(parent);
      private_directory(path_);
      if ((lock_ = try_lock(path_, O_CREAT))) return;
    } catch (const std::system_error& e) {
      if (e.code().value() != ENOENT || tries == kLockTries) throw;  // another pool's broker has just removed the parent
      errno = ENOENT;
    }
    if ((errno != EWOULDBLOCK && errno != ENOENT) || tries == kLockTries) throw std::system_error(errno, std::generic_category(), path_ + "/lock");
    rest_ms(1);
  }
}

void SpillDirectory::remove() {
  if (!lock_) return;
  erase(path_);
  lock_.reset();
}

void SpillDirectory::sweep_siblings() const {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(fs::path(path_).parent_path(), ignored)) {
    const std::string path = entry.path();
    if (path == path_ || !entry.is_directory(ignored)) continue;
    const Fd lock = try_lock(path);
    if (lock && !needed(path)) fs::remove_all(path, ignored);
  }
}

void clean_up(const std::string& path, pid_t broker) {
  SpillDirectory directory(path);
  directory.sweep_siblings();
  if (Fd pidfd = pidfd_of(broker)) {
    pollfd p{pidfd.get(), POLLIN, 0};
    while (::poll(&p, 1, -1) < 0 && errno == EINTR) {
    }
  }
  for (; directory.exists(); rest_ms(kLookMs)) {
    const Fd lock = try_lock(path);
    if (!lock) return;  // the next broker has it, and its own janitor
    if (!needed(path)) erase(path);
  }
}

}  // namespace mcr
