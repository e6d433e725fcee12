// A JSON text that is walked where it stands, for headers of a hundred thousand tensors: no document is built of it. It is
// checked as Json::parse() does, but for duplicate keys, which are refused in the objects that are walked. A JsonText
// outlives its views, and the views what they hand out.
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
    // The same for who finds duplicates itself.
    void for_each_of_any_key(FunctionRef<void(std::string_view key, JsonView value)> visit) const;
    // The values of some keys of an object: none where there is no such member.
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
    [[nodiscard]] size_t size() const;  // of an array or object; at most 2^24 - 1 is told

    [[nodiscard]] Json tree(int max_depth = Json::default_depth) const;  // the value as a document of its own

   private:
    friend class JsonText;
    JsonView(const ParsedJson* parsed, size_t place) : parsed_(parsed), place_(place) {}
    static constexpr size_t nowhere = 0;  // the tape begins with a word that is no value
    void find(std::span<const std::string_view> asked, std::span<size_t> places) const;
    [[noreturn]] static JsonView missing(std::string_view key);

    // Two words, so that calls pass a view in registers.
    const ParsedJson* parsed_;
    size_t place_;  // on simdjson's tape
};

class JsonText {
   public:
    // Throws CORRUPT that begins with `what`. The text may go afterwards.
    JsonText(std::string_view text, std::string_view what, int max_depth = Json::default_depth);
    JsonText(const JsonText&) = delete;
    JsonText& operator=(const JsonText&) = delete;
    ~JsonText();
    [[nodiscard]] JsonView root() const;

   private:
    std::unique_ptr<const ParsedJson> parsed_;
};

// Walks the members of an object that is too long to be parsed at once: `window_bytes` of them at a time, or one that is
// longer. It takes the texts that JsonText takes, but finds what is wrong when it comes there, and duplicate keys are
// found by who visits. Key and value last for the visit.
void for_each_member_of(std::string_view text, std::string_view what,
                        FunctionRef<void(std::string_view key, JsonView value)> visit,
                        size_t window_bytes = size_t{1} << 18);
// Where in the text of an object that of a member stands which is an object itself, by the key as it is written; empty if
// it was not found. It is sound if it can be walked, and the text parsed with {} in its place.
[[nodiscard]] std::string_view object_in(std::string_view text, std::string_view key);

}  // namespace tsr
