#include "rails.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace mcr::verbs {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;

// A list of all devices, for as long as one of them is being opened.
class Devices {
 public:
  Devices() : list_(library().get_device_list(&count_)) {
    if (!list_ && errno != ENOSYS && errno != ENOENT)
      throw call_failed("the RDMA devices", "ibv_get_device_list", errno);
  }
  ~Devices() {
    if (list_) library().free_device_list(list_);
  }
  Devices(const Devices&) = delete;
  ibv_device** begin() const { return list_; }
  ibv_device** end() const { return list_ ? list_ + count_ : nullptr; }

 private:
  int count_ = 0;
  ibv_device** list_;
};

std::string text_of(const PortName& p) { return p.device + " port " + std::to_string(p.port); }

[[noreturn]] void failed(const PortName& p, const char* op, int code, Failure failure = Failure::kTransport) {
  throw call_failed(text_of(p), op, code, failure);
}

bool overlap(const Piece& p, uint64_t address, uint64_t bytes) {
  return address - p.address < p.bytes || p.address - address < bytes;  // of two unsigned differences only one is small
}

Rail open_port(const PortName& name) {
  const Library& v = library();
  Rail rail;
  rail.port.name = name;
  Devices devices;
  const auto found = std::find_if(devices.begin(), devices.end(), [&](ibv_device* d) { return name.device == v.get_device_name(d); });
  if (found == devices.end()) throw Error(Failure::kUnavailable, "there is no RDMA device " + name.device, "ibv_open_device", ENODEV);
  rail.context.reset(v.open_device(*found));
  if (!rail.context) failed(name, "ibv_open_device", errno, Failure::kUnavailable);

  ibv_device_attr device{};
  if (const int e = v.query_device(rail.context.get(), &device)) failed(name, "ibv_query_device", e);
  ibv_port_attr port{};  // the symbol fills in less than the structure has now
  if (const int e = v.query_port(rail.context.get(), name.port, reinterpret_cast<_compat_ibv_port_attr*>(&port)))
    failed(name, "ibv_query_port", e, Failure::kUnavailable);
  if (port.state != IBV_PORT_ACTIVE) throw Error(Failure::kUnavailable, text_of(name) + " is not up", "ibv_query_port", ENETDOWN);
  ibv_gid gid{};
  if (v.query_gid(rail.context.get(), name.port, name.gid_index, &gid)) failed(name, "ibv_query_gid", errno);

  Port& p = rail.port;
  p.ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  p.lid = port.lid;
  std::memcpy(p.gid.data(), gid.raw, p.gid.size());
  p.mtu = port.active_mtu;
  p.reads_out = uint32_t(std::max(device.max_qp_init_rd_atom, 0));
  p.reads_in = uint32_t(std::max(device.max_qp_rd_atom, 0));
  p.max_message = port.max_msg_sz;
  p.max_registration = device.max_mr_size;
  p.max_requests = uint32_t(std::max(device.max_qp_wr, 0));
  p.max_completions = uint32_t(std::max(device.max_cqe, 0));
  if (!p.reads_out || !p.reads_in || !p.max_message)
    throw Error(Failure::kUnavailable, text_of(name) + " cannot do RDMA reads", "ibv_query_device", EOPNOTSUPP);
  rail.domain.reset(v.alloc_pd(rail.context.get()));
  if (!rail.domain) failed(name, "ibv_alloc_pd", errno);
  rail.none.reset(v.create_cq(rail.context.get(), 1, nullptr, nullptr, 0));
  if (!rail.none) failed(name, "ibv_create_cq", errno);
  return rail;
}

std::string limit_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit)) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

std::shared_ptr<Rails> Rails::open(const std::vector<PortName>& ports) {
  std::shared_ptr<Rails> out(new Rails);
  out->pid_ = ::getpid();
  out->pieces_ = std::make_shared<std::vector<Piece>>();
  for (const PortName& p : ports) out->rails_.push_back(open_port(p));
  return out;
}

Rails::~Rails() {
  if (!in_child()) return;
  // The descriptors are the parent's too: to undo anything here would undo it there.
  for (auto& [address, made] : memory_)
    for (MemoryPtr& m : made) m.release();
  for (Rail& r : rails_) {
    r.none.release();
    r.domain.release();
    r.context.release();
  }
}

bool Rails::in_child() const { return ::getpid() != pid_; }

void Rails::check_process() const {
  if (in_child())
    throw Error(Failure::kTransport, "RDMA devices that were opened before a fork cannot be used in the child", "fork", ECHILD);
}

std::vector<uint32_t> Rails::add(uint64_t address, uint64_t bytes, RailSet near) {
  return add(address, bytes, near, "ibv_reg_mr",
             [&](ibv_pd* domain) { return library().reg_mr(domain, reinterpret_cast<void*>(address), bytes, kAccess); });
}

std::vector<uint32_t> Rails::add_dmabuf(int file, uint64_t offset, uint64_t address, uint64_t bytes, RailSet near) {
  constexpr const char* kOp = "ibv_reg_dmabuf_mr";
  const auto make = library().reg_dmabuf_mr;
  if (!make) throw Error(Failure::kRegistration, "libibverbs has no ibv_reg_dmabuf_mr: it came with rdma-core 34", kOp, EOPNOTSUPP);
  return add(address, bytes, near, kOp, [&](ibv_pd* domain) { return make(domain, offset, bytes, address, file, kAccess); });
}

std::vector<uint32_t> Rails::add(uint64_t address, uint64_t bytes, RailSet near, const char* op,
                                 const std::function<ibv_mr*(ibv_pd*)>& make) {
  check_process();
  std::lock_guard lock(mutex_);
  std::vector<Piece> pieces = *pieces_;
  const auto at = std::lower_bound(pieces.begin(), pieces.end(), address, [](const Piece& p, uint64_t a) { return p.address < a; });
  const bool taken = std::any_of(pieces.begin(), pieces.end(), [&](const Piece& p) { return overlap(p, address, bytes); });
  if (taken || !bytes || address + bytes < address)
    throw Error(Failure::kRegistration, std::to_string(bytes) + " bytes: empty, or registered already in part", op, EINVAL);
  Piece piece{address, bytes, {}, near};
  std::vector<MemoryPtr> made;
  std::vector<uint32_t> remote;
  for (const Rail& rail : rails_) {
    MemoryPtr m(make(rail.domain.get()));
    if (!m) {
      const int code = errno;
      std::string text = rail.port.name.device + " cannot register " + std::to_string(bytes) + " bytes, with " +
                         std::to_string(registered_) + " bytes registered: " + std::strerror(code);
      if (code == ENOMEM || code == EPERM)
        text += " (RLIMIT_MEMLOCK is " + limit_text() + " here, and every registered byte is locked: raise it, `ulimit -l unlimited`)";
      throw Error(Failure::kRegistration, text, op, code);
    }
    piece.keys.push_back(m->lkey);
    remote.push_back(m->rkey);
    made.push_back(std::move(m));
  }
  pieces.insert(at, std::move(piece));
  auto all = std::make_shared<const std::vector<Piece>>(std::move(pieces));
  memory_.emplace(address, std::move(made));
  pieces_ = std::move(all);
  registered_ += bytes;
  return remote;
}

void Rails::remove(uint64_t address) {
  check_process();
  std::lock_guard lock(mutex_);
  std::vector<Piece> pieces = *pieces_;
  const auto at = std::find_if(pieces.begin(), pieces.end(), [&](const Piece& p) { return p.address == address; });
  if (at == pieces.end()) return;
  registered_ -= at->bytes;
  pieces.erase(at);
  pieces_ = std::make_shared<const std::vector<Piece>>(std::move(pieces));
  memory_.erase(address);
}

std::shared_ptr<const std::vector<Piece>> Rails::pieces() const {
  std::lock_guard lock(mutex_);
  return pieces_;
}

int memory_node(uint64_t address) {
  constexpr unsigned long kOfAddress = 2;  // MPOL_F_ADDR
  constexpr size_t kBits = 64;
  unsigned long nodes[16]{};
  int mode = 0, found = -1;
  if (::syscall(SYS_get_mempolicy, &mode, nodes, std::size(nodes) * kBits, address, kOfAddress)) return -1;
  for (size_t i = 0; i < std::size(nodes); ++i) {
    if (!nodes[i]) continue;
    if (found >= 0 || std::popcount(nodes[i]) > 1) return -1;
    found = int(i * kBits) + std::countr_zero(nodes[i]);
  }
  return found;
}

std::vector<std::string> device_names() {
  std::vector<std::string> out;
  for (ibv_device* d : Devices()) out.emplace_back(library().get_device_name(d));
  return out;
}

}  // namespace mcr::verbs
