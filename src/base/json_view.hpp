// Walks a JSON text in place, without building a document, for headers with a hundred thousand tensors. The checks are
// those of Json::parse(), except that duplicate keys are refused only in the objects that are walked. A JsonText must
// outlive its views, and a view the values that it returns.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/function_ref.hpp"
#include "base/json.hpp"

namespace tsr {

struct ParsedJson;  // what simdjson makes of a text; only json.cc includes simdjson

// One value of a JsonText; small, passed by value.
class JsonView {
   public:
    [[nodiscard]] Json::Kind kind() const;
    [[nodiscard]] bool is(Json::Kind asked) const { return kind() == asked; }

    // Each throws CORRUPT ("expected an array, found a string") if the kind differs, as those of Json do.
    [[nodiscard]] int64_t as_int() const;
    [[nodiscard]] std::string_view as_string() const;
    void for_each_item(FunctionRef<void(JsonView item)> visit) const;
    void for_each_member(FunctionRef<void(std::string_view key, JsonView value)> visit) const;
    // Likewise, for callers that detect duplicate keys themselves.
    void for_each_of_any_key(FunctionRef<void(std::string_view key, JsonView value)> visit) const;
    // The values of some keys of an object; nullopt for a missing member.
    template <size_t count>
    [[nodiscard]] std::array<std::optional<JsonView>, count> find(const std::string_view (&asked)[count]) const {
        std::array<size_t, count> places{};
        find(asked, places);
        std::array<std::optional<JsonView>, count> found;
        for (size_t i = 0; i < count; ++i) {
            if (places[i] != nowhere) found[i] = JsonView(parsed_, places[i]);
        }
        return found;
    }
    template <size_t count>
    [[nodiscard]] std::array<JsonView, count> at(const std::string_view (&asked)[count]) const {
        std::array<size_t, count> places{};
        find(asked, places);
        return [&]<size_t... i>(std::index_sequence<i...>) {
            return std::array<JsonView, count>{places[i] != nowhere ? JsonView(parsed_, places[i])
                                                                    : missing(asked[i])...};
        }(std::make_index_sequence<count>{});
    }
    [[nodiscard]] size_t size() const;  // of an array or object; saturates at 2^24 - 1

    [[nodiscard]] Json tree(int max_depth = Json::default_depth) const;  // the value as a separate document

   private:
    friend class JsonText;
    JsonView(const ParsedJson* parsed, size_t place) : parsed_(parsed), place_(place) {}
    static constexpr size_t nowhere = 0;  // the tape begins with a word that is not a value
    void find(std::span<const std::string_view> asked, std::span<size_t> places) const;
    [[noreturn]] static JsonView missing(std::string_view key);

    // Two words, so that calls pass a view in registers.
    const ParsedJson* parsed_;
    size_t place_;  // on simdjson's tape
};

class JsonText {
   public:
    // Throws CORRUPT with a message that begins with `what`. The text is not needed afterwards.
    JsonText(std::string_view text, std::string_view what, int max_depth = Json::default_depth);
    JsonText(const JsonText&) = delete;
    JsonText& operator=(const JsonText&) = delete;
    ~JsonText();
    [[nodiscard]] JsonView root() const;

   private:
    std::unique_ptr<const ParsedJson> parsed_;
};

// Walks the members of an object that is too long to parse at once: `window_bytes` at a time, or one longer member.
// Accepts the same texts as JsonText, but reports a fault only when it reaches it; `visit` must detect duplicate keys.
// Key and value are valid during the visit.
void for_each_member_of(std::string_view text, std::string_view what,
                        FunctionRef<void(std::string_view key, JsonView value)> visit,
                        size_t window_bytes = size_t{1} << 18);
// In the text of an object, the text of the member `key` (as written), which must itself be an object; empty if not
// found. It is valid if it can be walked, and if the text parses with {} in its place.
[[nodiscard]] std::string_view object_in(std::string_view text, std::string_view key);

}  // namespace tsr
