// One job on several threads, where there is enough to do.
#pragma once
#include <cstddef>
#include <functional>

namespace mcr {

// Calls piece(0) … piece(pieces - 1), in any order, on up to `threads` threads. Nobody waits for a helper that did not start.
// Once a piece returned false, those that did not start are left out. Returns whether every piece returned true.
// `piece` must not throw. Holds no state; safe to call from any thread and after a fork.
bool parallel(size_t pieces, unsigned threads, const std::function<bool(size_t)>& piece);

// One for each `per_thread` bytes that there are, up to one a core this process may run on.
unsigned threads_for(size_t bytes, size_t per_thread = 2 << 20);

// How many cores `threads_for` shall believe in; for tests. 0: those that there are.
void set_cores(unsigned cores);

}  // namespace mcr
