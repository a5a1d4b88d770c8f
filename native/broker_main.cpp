// mooncake-broker: the process that owns a node's pool. Started by the first client (mooncake_ray.store.node); not meant for the shell.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <system_error>

#include "pool/broker.h"

namespace {

constexpr int kAddressInUse = 17;  // told to whoever starts us: another broker has the name

int usage() {
  std::fputs("usage: mooncake-broker --name NAME --capacity BYTES [--prefault BYTES] [--watch-pid PID] [--linger SECONDS]\n", stderr);
  return 2;
}

// Goes on in a child that has left the starter's process tree: Ray kills the children of a worker that exits, a terminal signals its
// foreground group. The parent stays until the child serves the name (or failed to), and passes the outcome on. Returns the pipe to tell.
mcr::Fd detach() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC)) mcr::throw_errno("pipe2");
  mcr::Fd from(ends[0]), to(ends[1]);
  if (const pid_t pid = ::fork(); pid > 0) {
    to.reset();
    uint8_t outcome = 1;
    [[maybe_unused]] auto n = ::read(from.get(), &outcome, 1);
    ::_exit(outcome);
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

void tell(mcr::Fd& pipe, uint8_t outcome) {
  [[maybe_unused]] auto n = ::write(pipe.get(), &outcome, 1);
  pipe.reset();
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> args;
  for (int i = 1; i + 1 < argc; i += 2) args[argv[i]] = argv[i + 1];
  if (argc % 2 == 0 || !args.contains("--name") || !args.contains("--capacity")) return usage();
  mcr::BrokerConfig config;
  config.name = args["--name"];
  config.capacity = std::strtoull(args["--capacity"].c_str(), nullptr, 10) / mcr::kPageSize * mcr::kPageSize;
  config.prefault = std::strtoull(args["--prefault"].c_str(), nullptr, 10);
  config.watch_pid = std::atoi(args["--watch-pid"].c_str());
  if (args.contains("--linger")) config.linger_s = std::atof(args["--linger"].c_str());
  if (!config.capacity) return usage();
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGINT, SIG_IGN);
  ::prctl(PR_SET_NAME, "mooncake-broker");
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
    if (!taken) std::fprintf(stderr, "mooncake-broker: %s\n", e.what());
    if (starter) tell(starter, taken ? kAddressInUse : 1);
    return 1;
  }
}
