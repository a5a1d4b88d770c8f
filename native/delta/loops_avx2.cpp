// The same loops, compiled for processors with AVX2.
#include "delta/loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace mcr::delta {
namespace {
#include "delta/loops.inc"
}  // namespace

constexpr Loops kAvx2Loops MCR_LOOPS;

}  // namespace mcr::delta
#endif
