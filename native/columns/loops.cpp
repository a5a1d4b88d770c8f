// The loops for any processor of this architecture, and the choice.
#include "columns/loops.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mcr {
namespace {
#include "columns/loops.inc"
}  // namespace

constexpr Loops kBaseLoops MCR_LOOPS;

#if defined(__x86_64__)
const Loops& loops = __builtin_cpu_supports("avx2") ? kAvx2Loops : kBaseLoops;
#else
const Loops& loops = kBaseLoops;
#endif

}  // namespace mcr
