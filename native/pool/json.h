// Just enough to write JSON.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace mcr {

inline std::string quoted(std::string_view s) {
  std::string out = "\"";
  for (unsigned char c : s) {
    if (c == '"' || c == '\\') out += '\\', out += char(c);
    else if (c < 0x20 || c >= 0x7f) out += '?';
    else out += char(c);
  }
  return out + "\"";
}

// The members of a JSON object, or the items of a list.
struct Json {
  std::string text;
  Json& raw(std::string_view name, std::string_view value) {
    if (!text.empty()) text += ',';
    if (!name.empty()) text += '"', text += name, text += "\":";
    text += value;
    return *this;
  }
  Json& add(std::string_view name, uint64_t v) { return raw(name, std::to_string(v)); }
  Json& add(std::string_view name, bool v) { return raw(name, v ? "true" : "false"); }
  Json& add(std::string_view name, const std::string& v) { return raw(name, quoted(v)); }
  Json& object(std::string_view name, const Json& o) { return raw(name, "{" + o.text + "}"); }
  Json& list(std::string_view name, const Json& items) { return raw(name, "[" + items.text + "]"); }
};

}  // namespace mcr
