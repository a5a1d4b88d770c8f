// What the peer server is made of, without sockets: SHA-256 and HMAC against published vectors, and the tracker against a model of pullers.
#include <algorithm>
#include <random>
#include <set>

#include "check.h"
#include "peer/protocol.h"
#include "peer/tracker.h"

using namespace mcr;
using namespace mcr::peer;

namespace {

std::string hex(const Digest& d) {
  std::string s;
  for (uint8_t b : d) s += "0123456789abcdef"[b >> 4], s += "0123456789abcdef"[b & 15];
  return s;
}

TEST(sha256_vectors) {  // FIPS 180-4's examples
  CHECK_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex(sha256(std::string(1'000'000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(sha256_in_pieces) {
  std::string data(1000, 'x');
  for (size_t i = 0; i < data.size(); ++i) data[i] = char(i * 7);
  for (size_t cut : {1, 55, 56, 63, 64, 65, 128, 999}) {
    Sha256 h;
    h.update(data.data(), cut);
    h.update(data.data() + cut, data.size() - cut);
    CHECK_EQ(hex(h.finish()), hex(sha256(data)));
  }
}

TEST(hmac_vectors) {  // RFC 4231
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(same_digests) {
  const Digest a = sha256("a");
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    CHECK(same(a, b));
    b[i] ^= 1;
    CHECK(!same(a, b));
  }
}

TEST(macs_tell_roles_apart) {
  Challenge c{};
  Proof p{};
  Welcome w{};
  const Digest m = proof_mac("secret", c, p);
  CHECK(!same(m, welcome_mac("secret", c, p, w)));
  CHECK(!same(m, proof_mac("secreT", c, p)));
  c.nonce[31] = 1;
  CHECK(!same(m, proof_mac("secret", c, p)));
  c.nonce[31] = 0, p.me[0] = 'x';
  CHECK(!same(m, proof_mac("secret", c, p)));
}

TEST(n_pullers_at_once_are_a_chain) {
  Tracker t;
  const ObjectId id{1, 1};
  std::string before;
  for (int i = 0; i < 20; ++i) {
    const std::string me = "n" + std::to_string(i);
    CHECK_EQ(t.assign(id, me, ""), before);
    CHECK_EQ(t.load(id, before), 1u);
    before = me;
  }
}

TEST(complete_ones_come_first) {
  Tracker t;
  const ObjectId id{1, 1};
  t.assign(id, "z", "");
  t.finish(id, "z", true);
  CHECK_EQ(t.assign(id, "b", ""), "");   // home and z are free and complete
  CHECK_EQ(t.assign(id, "c", ""), "z");  // before b, which is still receiving
  CHECK_EQ(t.assign(id, "d", ""), "b");
}

TEST(nameless_pullers_leave_nothing) {
  Tracker t;
  CHECK_EQ(t.assign({1, 1}, "", ""), "");
  CHECK_EQ(t.size(), 0u);
}

// Pullers that come, finish, fail, blame and vanish. Whatever happens: nobody is sent to itself, round in circles, to one that has nothing, or
// back to whom it blames; the load is the number of those who read; and at the end nothing is left.
TEST(model) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 rng(seed);
    Tracker t;
    const ObjectId id{seed, 7};
    std::map<std::string, std::string> pulls;
    std::set<std::string> complete;
    for (int step = 0; step < 300; ++step) {
      check::context = "seed " + std::to_string(seed) + " step " + std::to_string(step);
      const std::string me = "n" + std::to_string(rng() % 9);
      auto vanish = [&](const std::string& who) {
        pulls.erase(who);
        complete.erase(who);
        std::erase_if(pulls, [&](auto& p) { return p.second == who; });  // until they come again
      };
      switch (rng() % 5) {
        case 0:
        case 1: {
          const std::string bad = pulls.contains(me) && rng() % 3 == 0 ? pulls[me] : "";
          complete.erase(me);
          const std::string from = t.assign(id, me, bad);
          pulls[me] = from;
          CHECK(from != me && (bad.empty() || from != bad));
          CHECK(from.empty() || complete.contains(from) || pulls.contains(from));
          std::string at = me;
          for (int hops = 0; pulls.contains(at) && !at.empty(); at = pulls[at]) CHECK(++hops <= 9);
          if (!bad.empty()) vanish(bad);
          break;
        }
        case 2:
          if (!pulls.contains(me)) break;
          t.finish(id, me, true);
          pulls.erase(me);
          complete.insert(me);
          break;
        case 3:
          if (!pulls.contains(me)) break;
          t.finish(id, me, false);
          vanish(me);
          break;
        default:
          t.forget(me);
          vanish(me);
      }
      for (const std::string& s : {std::string(), std::string("n0"), std::string("n1"), std::string("n2")})
        CHECK_EQ(t.load(id, s), size_t(std::count_if(pulls.begin(), pulls.end(), [&](auto& p) { return p.second == s; })));
    }
    for (int i = 0; i < 9; ++i) t.forget("n" + std::to_string(i));
    CHECK_EQ(t.size(), 0u);
  }
}

}  // namespace

int main() { return check::run(); }
