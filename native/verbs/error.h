// What goes wrong with RDMA, for callers who tell the cases apart.
#pragma once
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace mcr::verbs {

enum class Failure {
  kTransport,     // anything not below
  kRegistration,  // memory cannot be registered
  kPeerLost,      // the peer does not answer
  kUnavailable,   // no library, no such device
};

struct Error : std::runtime_error {
  Error(Failure failure, const std::string& text, std::string op, int code = 0)
      : std::runtime_error(text), failure(failure), op(std::move(op)), code(code) {}
  const Failure failure;
  const std::string op;  // the call that failed
  const int code;        // errno, or 0
};

// A call that failed on a device.
inline Error call_failed(const std::string& device, const char* op, int code, Failure failure = Failure::kTransport) {
  return Error(failure, device + ": " + op + ": " + std::strerror(code), op, code);
}

// `interrupted` said so while a read was waiting.
struct Interrupted : std::exception {};

}  // namespace mcr::verbs
