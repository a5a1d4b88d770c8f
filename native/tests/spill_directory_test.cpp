// The spill directory: one broker's at a time, private, and gone when nobody needs it.
#include "pool/spill_directory.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "harness.h"
#include "pool/journal.h"
#include "temporary.h"

using namespace mcr;
using harness::Child;
using harness::say;
using harness::wait_for_go;
namespace fs = std::filesystem;

namespace {

// A directory as a killed broker leaves it, with an object and sessions of these processes.
void leave_behind(const std::string& path, const std::vector<std::pair<pid_t, uint64_t>>& owners, bool objects = true) {
  SpillDirectory d(path);
  d.take();
  const uint8_t pool[16] = {};
  Journal j(d.journal(), pool, 0);
  SessionId s = 0;
  for (auto [pid, born] : owners) j.put(SavedSession{++s, pid, born, "owner", ""});
  if (objects) j.put(SavedObject{{1, 1}, 1, 1, 0, "", ""});
  j.commit();
}

std::string refusal(const std::string& path) {
  try {
    SpillDirectory(path).take();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

ROLE(sleeper) {
  say("ready");
  wait_for_go();
  return 0;
}
ROLE(taker) {
  SpillDirectory d(args[0]);
  d.take();
  say("taken");
  wait_for_go();
  if (args[1] == "removes") d.remove();
  say("done");
  wait_for_go();
  return 0;
}
ROLE(cleaner) {
  say("ready");
  clean_up(args[0], pid_t(std::stoi(args[1])));
  return 0;
}

TEST(one_process_at_a_time) {
  Temporary dir;
  const std::string path = dir / "pool/one";
  Child first({"taker", path, "removes"});
  first.expect("taken");
  CHECK(fs::exists(path + "/lock"));
  CHECK(refusal(path).find(path + "/lock") == 0);  // after a while
  Child second({"taker", path, "stays"});          // waits for it, for that while
  first.go();
  first.expect("done");
  second.expect("taken");
  CHECK(fs::exists(path + "/lock"));
  second.kill();
  second.wait();
  SpillDirectory third(path);  // a lock dies with its process
  CHECK(third.exists() && !third.taken());
  third.take();
  CHECK(third.taken());
  std::ofstream(third.data()) << "bytes";
  third.remove();
  CHECK(!third.exists() && !third.taken());
  CHECK(!fs::exists(dir / "pool"));  // was empty
}

TEST(a_parent_with_others_in_it_stays) {
  Temporary dir;
  SpillDirectory one(dir / "pool/one"), two(dir / "pool/two");
  one.take(), two.take();
  one.remove();
  CHECK(!one.exists() && two.exists());
  one.remove();  // is nothing any more
  two.remove();
  CHECK(!fs::exists(dir / "pool"));
}

TEST(only_a_private_directory_will_do) {
  Temporary dir;
  for (mode_t mode : {0720, 0702, 0777}) {
    check::context = std::to_string(mode);
    for (const char* which : {"parent", "pool"}) {
      const std::string parent = dir / "pool", path = parent + "/one";
      fs::create_directories(path);
      CHECK(!::chmod(parent.c_str(), 0700) && !::chmod(path.c_str(), 0700));
      const std::string& open = *which == 'p' && which[1] == 'a' ? parent : path;
      CHECK(!::chmod(open.c_str(), mode));
      CHECK(refusal(path) == open + " must be a directory of this user that nobody else can write to");
      CHECK(!::chmod(open.c_str(), 0755));  // may be seen
      CHECK(refusal(path).empty());
    }
  }
  fs::create_directory(dir / "elsewhere");
  fs::create_directory_symlink(dir / "elsewhere", dir / "link");
  CHECK(refusal(dir / "link/one").find("link must be a directory of this user") != std::string::npos);
  std::ofstream(dir / "file") << "x";
  CHECK(refusal(dir / "file/one").find("file must be a directory of this user") != std::string::npos);
  fs::create_directories(dir / "locked/one/lock");
  CHECK(!::chmod((dir / "locked").c_str(), 0700) && !::chmod((dir / "locked/one").c_str(), 0700));
  CHECK(refusal(dir / "locked/one") == dir / "locked/one/lock: " + std::strerror(EISDIR));
  if (!::geteuid()) {
    fs::create_directory(dir / "theirs");
    CHECK(!::chmod((dir / "theirs").c_str(), 0700) && !::chown((dir / "theirs").c_str(), 65534, 65534));
    CHECK(refusal(dir / "theirs/one").find("theirs must be a directory of this user") != std::string::npos);
  }
}

TEST(siblings_go_when_nobody_can_come_back_for_them) {
  Temporary dir;
  const auto sibling = [&](const char* name) { return dir / (std::string("pool/") + name); };
  Child alive({"sleeper"}), dead({"sleeper"});
  alive.expect("ready"), dead.expect("ready");
  const uint64_t born = process_start(alive.pid), died = process_start(dead.pid);
  CHECK(born && died);
  const pid_t gone = dead.pid;
  leave_behind(sibling("live owner"), {{gone, died}, {alive.pid, born}});
  leave_behind(sibling("dead owner"), {{gone, died}});
  leave_behind(sibling("another of its pid"), {{alive.pid, born + 1}});
  leave_behind(sibling("unknown birth"), {{alive.pid, 0}});
  leave_behind(sibling("no objects"), {{alive.pid, born}}, false);
  leave_behind(sibling("spoilt"), {{alive.pid, born}});
  fs::resize_file(sibling("spoilt") + "/journal", 9);
  { SpillDirectory(sibling("no journal")).take(); }
  fs::create_directory(sibling("not ours"));  // has no lock
  std::ofstream(sibling("a file")) << "x";
  SpillDirectory used(sibling("in use"));
  used.take();
  dead.kill(), dead.wait();
  SpillDirectory own(sibling("own"));
  own.take();
  own.sweep_siblings();
  for (const char* name : {"live owner", "not ours", "a file", "in use", "own"}) CHECK(fs::exists(sibling(name)));
  for (const char* name : {"dead owner", "another of its pid", "unknown birth", "no objects", "spoilt", "no journal"}) {
    check::context = name;
    CHECK(!fs::exists(sibling(name)));
  }
  alive.kill(), alive.wait();
  own.sweep_siblings();
  CHECK(!fs::exists(sibling("live owner")));
}

TEST(a_janitor_waits_for_the_broker_and_then_for_the_owners) {
  Temporary dir;
  const std::string path = dir / "pool/one";
  Child owner({"sleeper"}), broker({"taker", path, "stays"});
  owner.expect("ready"), broker.expect("taken");
  Child janitor({"cleaner", path, std::to_string(broker.pid)});
  janitor.expect("ready");
  {
    const uint8_t pool[16] = {};
    Journal j(path + "/journal", pool, 0);
    j.put(SavedSession{1, owner.pid, process_start(owner.pid), "owner", ""});
    j.put(SavedObject{{1, 1}, 1, 1, 0, "", ""});
    j.commit();
  }
  broker.kill(), broker.wait();
  int status;
  // It looks once a second. Long enough for two looks; a janitor that does not heed the owner has gone by then.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  while (std::chrono::steady_clock::now() < end) {
    CHECK(fs::exists(path + "/journal"));
    CHECK_EQ(::waitpid(janitor.pid, &status, WNOHANG), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  owner.kill(), owner.wait();
  CHECK_EQ(janitor.wait(), 0);
  CHECK(!fs::exists(dir / "pool"));
}

TEST(a_janitor_leaves_to_the_next_broker_what_is_its) {
  Temporary dir;
  const std::string path = dir / "pool/one";
  Child first({"taker", path, "stays"});
  first.expect("taken");
  Child janitor({"cleaner", path, std::to_string(first.pid)});
  janitor.expect("ready");
  janitor.stop();
  first.kill(), first.wait();
  SpillDirectory next(path);
  next.take();
  janitor.signal(SIGCONT);
  CHECK_EQ(janitor.wait(), 0);
  CHECK(next.exists());
  CHECK(fs::exists(path + "/lock"));
  next.remove();
}

TEST(a_janitor_has_nothing_to_do_where_the_broker_left_in_peace) {
  Temporary dir;
  const std::string path = dir / "pool/one";
  Child broker({"taker", path, "removes"});
  broker.expect("taken");
  Child janitor({"cleaner", path, std::to_string(broker.pid)});
  janitor.expect("ready");
  broker.go();
  broker.expect("done");
  broker.go();
  CHECK_EQ(broker.wait(), 0);
  CHECK_EQ(janitor.wait(), 0);
}

TEST(when_a_process_began) {
  const uint64_t own = process_start(::getpid());
  CHECK(own > 0);
  CHECK_EQ(process_start(::getpid()), own);
  for (pid_t pid : {0, -1, INT32_MAX}) CHECK_EQ(process_start(pid), 0u);
  Child child({"sleeper"});
  child.expect("ready");
  const uint64_t theirs = process_start(child.pid);
  CHECK(theirs >= own);
  child.kill();
  UNTIL(process_start(child.pid) == 0);  // a zombie until it is waited for
  CHECK_EQ(::kill(child.pid, 0), 0);
  child.wait();
  // A name that looks like the rest of the line.
  const pid_t odd = ::fork();
  if (!odd) {
    ::prctl(PR_SET_NAME, "a) Z 1 2 3");
    for (;;) ::pause();
  }
  CHECK(odd > 0);
  UNTIL(([&] {
    std::string name;
    std::getline(std::ifstream("/proc/" + std::to_string(odd) + "/comm"), name);
    return name == "a) Z 1 2 3";
  })());
  CHECK(process_start(odd) >= own);
  ::kill(odd, SIGKILL);
  ::waitpid(odd, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) { return harness::main(argc, argv); }
