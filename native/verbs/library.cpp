#include "library.h"

#include <dlfcn.h>
#include <sys/utsname.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "error.h"

namespace mcr::verbs {
namespace {

struct Loaded {
  Library table{};
  std::string why;  // it is not
  int code = 0;
};

// Before 5.12 a fork could take registered pages away from their process, and the library has to mark them.
bool kernel_copies_pinned_pages() {
  utsname name;
  int major = 0, minor = 0;
  return ::uname(&name) == 0 && std::sscanf(name.release, "%d.%d", &major, &minor) == 2 && (major > 5 || (major == 5 && minor >= 12));
}

Loaded load() {
  Loaded out;
  void* handle = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    out.why = ::dlerror();
    return out;
  }
  // Some names are there twice, once with the structures of version 1.0.
  const auto find = [&](auto& pointer, const char* name) {
    void* symbol = ::dlvsym(handle, name, "IBVERBS_1.1");
    if (!symbol) symbol = ::dlsym(handle, name);
    if (!symbol) out.why = std::string("libibverbs.so.1 has no ") + name;
    std::memcpy(&pointer, &symbol, sizeof pointer);
  };
  Library& t = out.table;
  find(t.get_device_list, "ibv_get_device_list");
  find(t.free_device_list, "ibv_free_device_list");
  find(t.get_device_name, "ibv_get_device_name");
  find(t.open_device, "ibv_open_device");
  find(t.close_device, "ibv_close_device");
  find(t.query_device, "ibv_query_device");
  find(t.query_port, "ibv_query_port");
  find(t.query_gid, "ibv_query_gid");
  find(t.alloc_pd, "ibv_alloc_pd");
  find(t.dealloc_pd, "ibv_dealloc_pd");
  find(t.reg_mr, "ibv_reg_mr");
  find(t.dereg_mr, "ibv_dereg_mr");
  find(t.create_comp_channel, "ibv_create_comp_channel");
  find(t.destroy_comp_channel, "ibv_destroy_comp_channel");
  find(t.create_cq, "ibv_create_cq");
  find(t.destroy_cq, "ibv_destroy_cq");
  find(t.get_cq_event, "ibv_get_cq_event");
  find(t.ack_cq_events, "ibv_ack_cq_events");
  find(t.create_qp, "ibv_create_qp");
  find(t.destroy_qp, "ibv_destroy_qp");
  find(t.modify_qp, "ibv_modify_qp");
  find(t.fork_init, "ibv_fork_init");
  find(t.wc_status_str, "ibv_wc_status_str");
  void* const dmabuf = ::dlsym(handle, "ibv_reg_dmabuf_mr");
  std::memcpy(&t.reg_dmabuf_mr, &dmabuf, sizeof dmabuf);
  if (!out.why.empty() || kernel_copies_pinned_pages()) return out;
  out.code = t.fork_init();
  if (out.code) out.why = std::string("this kernel is older than 5.12, and ibv_fork_init failed: ") + std::strerror(out.code);
  return out;
}

}  // namespace

const Library& library() {
  static const Loaded loaded = load();
  if (!loaded.why.empty()) throw Error(Failure::kUnavailable, "RDMA is not available: " + loaded.why, "dlopen", loaded.code);
  return loaded.table;
}

}  // namespace mcr::verbs
