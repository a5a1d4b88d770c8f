// The loops for any processor of this architecture, and the choice.
#include "delta/loops.h"

namespace mcr::delta {
namespace {
#include "delta/loops.inc"
}  // namespace

constexpr Loops kBaseLoops MCR_LOOPS;

#if defined(__x86_64__)
const Loops& loops = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? kAvx512Loops
                     : __builtin_cpu_supports("avx2")                                                                               ? kAvx2Loops
                                                                                                                                    : kBaseLoops;
#else
const Loops& loops = kBaseLoops;
#endif

}  // namespace mcr::delta
