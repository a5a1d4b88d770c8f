// The RDMA ports that this process reads and is read by, and the memory that it registered with all of them.
//
// In a forked child the object is dead: every call says so, and destructors leave the parent's devices alone.
#pragma once
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "library.h"
#include "plan.h"

namespace mcr::verbs {

// Calls one of the library's functions that undo another.
template <auto Undo>
struct Undoing {
  template <class T>
  void operator()(T* p) const {
    (library().*Undo)(p);
  }
};
using ContextPtr = std::unique_ptr<ibv_context, Undoing<&Library::close_device>>;
using DomainPtr = std::unique_ptr<ibv_pd, Undoing<&Library::dealloc_pd>>;
using MemoryPtr = std::unique_ptr<ibv_mr, Undoing<&Library::dereg_mr>>;
using ChannelPtr = std::unique_ptr<ibv_comp_channel, Undoing<&Library::destroy_comp_channel>>;
using CompletionsPtr = std::unique_ptr<ibv_cq, Undoing<&Library::destroy_cq>>;
using QueuePtr = std::unique_ptr<ibv_qp, Undoing<&Library::destroy_qp>>;

using Gid = std::array<uint8_t, 16>;

struct PortName {
  std::string device;
  uint8_t port = 1;
  int gid_index = 0;
};

// A port: where it is, and what it can do.
struct Port {
  PortName name;
  bool ethernet = false;  // else InfiniBand
  uint16_t lid = 0;
  Gid gid{};
  int mtu = 0;                                // as ibv_mtu counts
  uint32_t reads_out = 0, reads_in = 0;       // that a queue pair can have under way, asked and answered
  uint32_t max_message = 0;                   // bytes
  uint64_t max_registration = 0;              // bytes
  uint32_t max_requests = 0, max_completions = 0;
};

// One port, open. The members die in the order that the library wants.
struct Rail {
  Port port;
  ContextPtr context;
  DomainPtr domain;
  CompletionsPtr none;  // of queue pairs that only answer, which complete nothing
};

class Rails : public std::enable_shared_from_this<Rails> {
 public:
  // Throws Error: kUnavailable for a device or port that is not there or not up.
  static std::shared_ptr<Rails> open(const std::vector<PortName>& ports);
  ~Rails();

  size_t size() const { return rails_.size(); }
  const Rail& operator[](size_t i) const { return rails_[i]; }

  // Lets every rail read into that memory, and peers read it. Returns the keys for peers, one a rail. Pins all its pages. The memory must
  // stay mapped, and have nothing in common with memory that is registered already. `near`: see Piece. Throws Error(kRegistration).
  std::vector<uint32_t> add(uint64_t address, uint64_t bytes, RailSet near = kAllRails);
  // The same for memory of another device, of which `file` is a dma-buf. It begins at `offset` there, and its address is that device's. The
  // descriptor is only borrowed.
  std::vector<uint32_t> add_dmabuf(int file, uint64_t offset, uint64_t address, uint64_t bytes, RailSet near = kAllRails);

  // Takes back what `add` did. For memory that no read goes into and that no peer was told of; does nothing for an address that was not added.
  void remove(uint64_t address);

  // This process's pieces, sorted by address, with the keys for its own reads. Pieces that are added later are in later lists.
  std::shared_ptr<const std::vector<Piece>> pieces() const;

  void check_process() const;  // throws Error in a forked child
  bool in_child() const;

 private:
  Rails() = default;
  std::vector<uint32_t> add(uint64_t address, uint64_t bytes, RailSet near, const char* op, const std::function<ibv_mr*(ibv_pd*)>& make);

  pid_t pid_ = 0;
  std::vector<Rail> rails_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::vector<MemoryPtr>> memory_;  // by address; after the rails: it is let go of before them
  std::shared_ptr<const std::vector<Piece>> pieces_;
  uint64_t registered_ = 0;  // bytes
};

// The NUMA node that memory is bound to, or prefers; -1: to none, or to several, or the kernel does not say. Touches no page.
int memory_node(uint64_t address);

// The names of the devices that the library can open. Empty where the kernel has no RDMA.
std::vector<std::string> device_names();

}  // namespace mcr::verbs
