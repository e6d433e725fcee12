// A JSON text that is walked where it stands, for headers of a hundred thousand tensors: no document is built of it. It is
// checked as Json::parse() does, but for duplicate keys, which are refused in the objects that are walked. A JsonText
// outlives its views, and the views what they hand out.
#pragma once

#include <simdjson.h>

#include <array>
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "base/json.hpp"

namespace tsr {

// Keeps track of the keys of one object. Keys in order cost a comparison each; else sorting finds duplicates in n log n.
class KeyCheck {
   public:
    explicit KeyCheck(const std::string& what) : what_(what) {}
    void add(std::string_view key) {
        if (key <= last_ && count_ > 0) in_order_ = false;
        last_ = key;
        if (count_ < few_.size()) {
            few_[count_] = key;
        } else {
            if (count_ == few_.size()) many_.assign(few_.begin(), few_.end());
            many_.push_back(key);
        }
        ++count_;
    }
    void finish();  // throws CORRUPT if a key came twice

   private:
    const std::string& what_;
    std::string_view last_;
    bool in_order_ = true;
    size_t count_ = 0;
    std::array<std::string_view, 8> few_;
    std::vector<std::string_view> many_;
};

// One value of a JsonText; small, passed by value.
class JsonView {
   public:
    [[nodiscard]] Json::Kind kind() const;
    [[nodiscard]] bool is(Json::Kind asked) const { return kind() == asked; }

    // Each throws CORRUPT ("expected an array, found a string") if the kind differs, as those of Json do.
    [[nodiscard]] int64_t as_int() const;
    [[nodiscard]] std::string_view as_string() const;
    template <std::invocable<JsonView> Visit>
    void for_each_item(Visit visit) const {
        for (const auto item : array()) visit(JsonView(*what_, item));
    }
    template <std::invocable<std::string_view, JsonView> Visit>
    void for_each_member(Visit visit) const {
        KeyCheck keys(*what_);
        for_each_of_any_key([&](std::string_view key, JsonView value) {
            keys.add(key);
            visit(key, value);
        });
        keys.finish();
    }
    // The same for who finds duplicates itself.
    template <std::invocable<std::string_view, JsonView> Visit>
    void for_each_of_any_key(Visit visit) const {
        for (const auto field : object()) visit(std::string_view(field.key), JsonView(*what_, field.value));
    }
    // The values of some keys of an object: none where there is no such member.
    template <size_t count>
    [[nodiscard]] std::array<std::optional<JsonView>, count> find(const std::string_view (&asked)[count]) const {
        std::array<std::optional<JsonView>, count> found;
        for_each_member([&](std::string_view key, JsonView value) {
            for (size_t i = 0; i < count; ++i) {
                if (asked[i] == key) found[i] = value;
            }
        });
        return found;
    }
    template <size_t count>
    [[nodiscard]] std::array<JsonView, count> at(const std::string_view (&asked)[count]) const {
        const auto found = find(asked);
        return [&]<size_t... i>(std::index_sequence<i...>) {
            return std::array<JsonView, count>{found[i] ? *found[i] : missing(asked[i])...};
        }(std::make_index_sequence<count>{});
    }
    [[nodiscard]] size_t size() const;  // of an array or object; at most 2^24 - 1 is told

    [[nodiscard]] Json tree(int max_depth = Json::default_depth) const;  // the value as a document of its own

   private:
    friend class JsonText;
    JsonView(const std::string& what, simdjson::dom::element element) : what_(&what), element_(element) {}
    [[nodiscard]] simdjson::dom::array array() const;
    [[nodiscard]] simdjson::dom::object object() const;
    [[noreturn]] static JsonView missing(std::string_view key);

    const std::string* what_;
    simdjson::dom::element element_;
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
    struct Parsed;  // its size depends on how simdjson is compiled, which is known in one place
    std::unique_ptr<const Parsed> parsed_;
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
