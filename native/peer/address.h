// Names and numbers of TCP endpoints.
#pragma once
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace mcr::peer {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  bool unspecified() const {
    if (family() == AF_INET) return reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr == INADDR_ANY;
    return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  }
  uint16_t port() const {
    return ntohs(family() == AF_INET ? reinterpret_cast<const sockaddr_in&>(storage).sin_port : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  }
};

// Throws std::invalid_argument where the name stands for nothing.
inline Address resolve(const std::string& host, uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (host.empty()) throw std::invalid_argument("a peer's host must not be empty");
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error) throw std::invalid_argument("no address for host \"" + host + "\": " + ::gai_strerror(error));
  Address a;
  a.length = found->ai_addrlen;
  std::memcpy(&a.storage, found->ai_addr, found->ai_addrlen);
  ::freeaddrinfo(found);
  return a;
}

}  // namespace mcr::peer
