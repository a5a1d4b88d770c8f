// One job on several threads, where there is enough to do.
#pragma once
#include <cstddef>
#include <functional>

namespace mcr {

// Calls piece(0) … piece(pieces - 1), in any order. `bytes` is how much memory they go through in all: below some MiB this thread does all,
// above it there is one thread for each few MiB, up to one a core this process may run on. Nobody waits for a helper that did not start.
// Once a piece returned false, those that did not start are left out. Returns whether every piece returned true.
// `piece` must not throw. Holds no state; safe to call from any thread and after a fork.
bool parallel(size_t pieces, size_t bytes, const std::function<bool(size_t)>& piece);

// How many threads that would be at most; for tests, 0 for what the machine has.
void set_threads(unsigned threads);

}  // namespace mcr
