// A small JSON document: null, bool, int64, uint64 (only beyond int64), double, string, array, object in its order.
// Parsing refuses ambiguous input: duplicate keys, invalid UTF-8, bytes after the end, numbers beyond 64 bits, nesting
// deeper than allowed. Writing is compact, and a double always has a '.' or an 'e', so that ints and doubles keep their
// kinds in a round trip.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tsr {

class Json {
   public:
    struct Member;
    using Array = std::vector<Json>;
    using Object = std::vector<Member>;
    enum class Kind { null, boolean, int64, uint64, number, string, array, object };  // the variant's order

    static constexpr int default_depth = 256;

    Json() = default;
    // NOLINTBEGIN(google-explicit-constructor): where a value is asked for, a plain one may stand.
    Json(bool value);
    Json(int value);
    Json(int64_t value);
    Json(uint64_t value);  // becomes int64 where it fits
    Json(double value);
    Json(std::string value);
    Json(std::string_view value);
    Json(const char* value);
    Json(Array value);
    Json(Object value);
    // NOLINTEND(google-explicit-constructor)

    // Throws CORRUPT with a message that begins with `what` and names the fault.
    [[nodiscard]] static Json parse(std::string_view text, std::string_view what, int max_depth = default_depth);
    // Throws INVALID_ARGUMENT on NaN, infinities and strings that are not UTF-8.
    [[nodiscard]] std::string dump() const;
    void dump_to(std::string& out) const;

    [[nodiscard]] Kind kind() const { return static_cast<Kind>(value_.index()); }
    [[nodiscard]] bool is(Kind kind_asked) const { return kind() == kind_asked; }

    // Each throws CORRUPT ("expected an array, found a string") if the kind differs.
    [[nodiscard]] bool as_bool() const;
    [[nodiscard]] int64_t as_int() const;
    [[nodiscard]] double as_double() const;  // numbers of any kind
    [[nodiscard]] const std::string& as_string() const;
    [[nodiscard]] const Array& as_array() const;
    [[nodiscard]] const Object& as_object() const;
    [[nodiscard]] Array& array() { return std::get<Array>(value_); }
    [[nodiscard]] Object& object() { return std::get<Object>(value_); }

    [[nodiscard]] const Json* find(std::string_view key) const;  // objects: the member's value or nullptr
    [[nodiscard]] const Json& at(std::string_view key) const;    // throws CORRUPT naming the key
    void set(std::string_view key, Json value);                  // appends; the caller must avoid duplicate keys

    friend bool operator==(const Json&, const Json&);

   private:
    std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array, Object> value_;
};

struct Json::Member {
    std::string key;
    Json value;
    friend bool operator==(const Member&, const Member&) = default;
};

// Defined here, where Member is complete: an object's vector cannot be constructed before (GCC accepts it, Clang does
// not).
inline Json::Json(bool value) : value_(value) {}
inline Json::Json(int value) : value_(int64_t{value}) {}
inline Json::Json(int64_t value) : value_(value) {}
inline Json::Json(double value) : value_(value) {}
inline Json::Json(std::string value) : value_(std::move(value)) {}
inline Json::Json(std::string_view value) : value_(std::string(value)) {}
inline Json::Json(const char* value) : value_(std::string(value)) {}
inline Json::Json(Array value) : value_(std::move(value)) {}

// Appends `text` in quotes, escaped; throws INVALID_ARGUMENT if it is not UTF-8.
void append_json_string(std::string& out, std::string_view text);
void append_json_escaped(std::string& out, std::string_view text);  // without the quotes
// Appends the shortest text that reads back as the same double, with a '.' or an 'e'.
void append_json_double(std::string& out, double value);
[[nodiscard]] bool is_utf8(std::string_view text);

// `text` with a '?' for each byte that is not UTF-8, so that truncated messages or other encodings stay readable.
[[nodiscard]] std::string readable_utf8(std::string_view text);

}  // namespace tsr
