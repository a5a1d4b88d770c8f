// The same loops, compiled for processors with AVX-512.
#include "delta/loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace mcr::delta {
namespace {
#include "delta/loops.inc"
}  // namespace

constexpr Loops kAvx512Loops MCR_LOOPS;

}  // namespace mcr::delta
#endif
