// All that the tests need of a framework: named cases, checks that say where they failed, and waiting for a condition.
#pragma once
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace check {

inline std::string context;  // printed with a failure: the seed and the step of a property test

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s%s%s\n", file, line, what.c_str(), context.empty() ? "" : "\n  with ", context.c_str());
  std::fflush(nullptr);
  std::_Exit(1);  // other threads run; no destructor of theirs is safe now
}

template <class A, class B>
void equal(const char* file, int line, const char* what, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream out;
  out << what << ": " << a << " != " << b;
  fail(file, line, out.str());
}

// Polls; the deadline only turns a hang into a failure.
template <class F>
void until(const char* file, int line, const char* what, F&& holds, int seconds = 60) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) fail(file, line, std::string("never came true: ") + what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The first number of that name in a JSON text.
inline unsigned long long number(const std::string& json, const std::string& name) {
  const size_t at = json.find("\"" + name + "\":");
  if (at == std::string::npos) fail(__FILE__, __LINE__, "no " + name + " in " + json);
  return std::strtoull(json.c_str() + at + name.size() + 3, nullptr, 10);
}

inline std::vector<std::pair<const char*, void (*)()>> cases;
struct Case {
  Case(const char* name, void (*run)()) { cases.emplace_back(name, run); }
};

// Runs the cases whose names contain $ONLY.
inline int run() {
  const char* only = std::getenv("ONLY");
  int ran = 0;
  for (auto [name, f] : cases) {
    if (only && !std::strstr(name, only)) continue;
    const auto start = std::chrono::steady_clock::now();
    context.clear();
    f();
    ++ran;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%-44s %6.2f s\n", name, took.count());
    std::fflush(stdout);
  }
  return ran ? 0 : 1;
}

}  // namespace check

#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, "not true: " #condition))
#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, a, b)
#define UNTIL(condition) check::until(__FILE__, __LINE__, #condition, [&] { return bool(condition); })
#define TEST(name)                              \
  static void name();                           \
  static check::Case case_of_##name{#name, name}; \
  static void name()
