// mooncake-broker: the process that owns a node's pool. Started by the first client (mooncake_ray.store.node); not meant for the shell.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "pool/broker.h"

namespace {

constexpr int kAddressInUse = 17;  // told to whoever starts us: another broker has the name

int usage(const char* problem) {
  std::fprintf(stderr,
               "mooncake-broker: %s\n"
               "usage: mooncake-broker --name NAME --capacity BYTES [--most BYTES] [--prefault BYTES] [--watch-pid PID] [--linger SECONDS]\n"
               "         [--arena BYTES] [--huge-pages auto|hugetlb|never] [--numa-nodes N,N…] [--quota BYTES]\n"
               "         [--spill-dir DIR --spill-limit BYTES [--spill-high PART] [--spill-low PART] [--disk-reserve PART]]\n"
               "       mooncake-broker --clean-up-after PID DIR\n",
               problem);
  return 2;
}

std::vector<int> numbers(const std::string& list) {
  std::vector<int> out;
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    out.push_back(std::atoi(list.substr(at, end - at).c_str()));
    at = end + 1;
  }
  return out;
}

// "" or what is wrong with the arguments.
std::string parse(int argc, char** argv, mcr::BrokerConfig* c) {
  auto bytes = [](uint64_t* to) { return [to](const std::string& v) { return *to = std::strtoull(v.c_str(), nullptr, 10), true; }; };
  auto number = [](double* to) { return [to](const std::string& v) { return *to = std::atof(v.c_str()), true; }; };
  auto text = [](std::string* to) { return [to](const std::string& v) { return *to = v, true; }; };
  const std::map<std::string, std::function<bool(const std::string&)>> options = {
      {"--name", text(&c->name)},
      {"--capacity", bytes(&c->capacity)},
      {"--most", bytes(&c->most)},
      {"--prefault", bytes(&c->prefault)},
      {"--watch-pid", [c](const std::string& v) { return c->watch_pid = std::atoi(v.c_str()), true; }},
      {"--linger", number(&c->linger_s)},
      {"--arena", bytes(&c->arena)},
      {"--numa-nodes", [c](const std::string& v) { return c->nodes = numbers(v), !c->nodes.empty(); }},
      {"--quota", bytes(&c->quota)},
      {"--spill-dir", text(&c->spill_dir)},
      {"--spill-limit", bytes(&c->spill_limit)},
      {"--spill-high", number(&c->high)},
      {"--spill-low", number(&c->low)},
      {"--disk-reserve", number(&c->disk_reserve)},
      {"--huge-pages",
       [c](const std::string& v) {
         c->huge_pages = v == "hugetlb" ? mcr::HugePages::kHugetlb : v == "never" ? mcr::HugePages::kNever : mcr::HugePages::kAuto;
         return v == "hugetlb" || v == "never" || v == "auto";
       }},
  };
  for (int i = 1; i < argc; i += 2) {
    auto o = options.find(argv[i]);
    if (o == options.end()) return std::string("no option ") + argv[i];
    if (i + 1 == argc || !o->second(argv[i + 1])) return std::string(argv[i]) + " needs a value, and not that one";
  }
  for (uint64_t* rounded : {&c->capacity, &c->arena, &c->spill_limit}) *rounded = *rounded / mcr::kPageSize * mcr::kPageSize;
  if (c->name.empty() || !c->capacity || !c->arena) return "--name, --capacity and a size of arenas are needed";
  return "";
}

// Goes on in a child that has left the starter's process tree: Ray kills the children of a worker that exits, a terminal signals its
// foreground group. The parent stays until the child serves the name (or failed to), and passes the outcome on: as its status, and on
// standard output what went wrong. Returns the pipe to tell.
mcr::Fd detach() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC)) mcr::throw_errno("pipe2");
  mcr::Fd from(ends[0]), to(ends[1]);
  if (const pid_t pid = ::fork(); pid > 0) {
    to.reset();
    std::string told;
    char some[512];
    for (ssize_t n; (n = ::read(from.get(), some, sizeof some)) > 0;) told.append(some, size_t(n));
    if (told.size() > 1) [[maybe_unused]] auto n = ::write(1, told.data() + 1, told.size() - 1);
    ::_exit(told.empty() ? 1 : told[0]);
  } else if (pid < 0) {
    mcr::throw_errno("fork");
  }
  ::setsid();
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd : {0, 1}) ::dup2(null, fd);
  if (null > 2) ::close(null);
  if (::chdir("/")) mcr::throw_errno("chdir");
  return to;
}

void tell(mcr::Fd& pipe, char outcome, const std::string& why = "") {
  const std::string text = outcome + why;
  [[maybe_unused]] auto n = ::write(pipe.get(), text.data(), text.size());
  pipe.reset();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && !std::strcmp(argv[1], "--clean-up-after")) {
    ::prctl(PR_SET_NAME, "mooncake-janitor");
    mcr::clean_up(argv[3], std::atoi(argv[2]));
    return 0;
  }
  mcr::BrokerConfig config;
  if (const std::string problem = parse(argc, argv, &config); !problem.empty()) return usage(problem.c_str());
  config.janitor = "/proc/self/exe";
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGINT, SIG_IGN);
  ::prctl(PR_SET_NAME, "mooncake-broker");
  if (rlimit files; !::getrlimit(RLIMIT_NOFILE, &files)) {  // some three descriptors a client
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  mcr::Fd starter;
  try {
    starter = detach();
    mcr::Broker broker(config);
    tell(starter, 0);
    broker.run();
    return 0;
  } catch (const std::exception& e) {
    const auto* se = dynamic_cast<const std::system_error*>(&e);
    const bool taken = se && se->code().value() == EADDRINUSE;
    if (starter) tell(starter, taken ? kAddressInUse : 1, taken ? "" : e.what());
    else std::fprintf(stderr, "mooncake-broker: %s\n", e.what());
    return 1;
  }
}
