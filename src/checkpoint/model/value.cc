#include "checkpoint/model/value.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "base/error.hpp"

namespace tsr {

namespace {

// A place within a value; turned into text only for a message, as keys may be long and values many.
struct Place {
    const Place* above = nullptr;
    std::string_view key = {};  // of an object's member
    size_t index = 0;           // of a list's item, where there is no key
    bool is_key = false;

    [[nodiscard]] std::string str() const {
        if (above == nullptr) return "";
        return above->str() + (is_key ? fmt::format(".{}", key) : fmt::format("[{}]", index));
    }
};

[[noreturn]] void refuse(std::string_view what, const Place& where, std::string_view why) {
    const std::string place = where.str();
    throw Error(Code::invalid_argument,
                fmt::format("{} is not a typed value{}: {}", what, place.empty() ? "" : " at " + place, why));
}

bool is_base64(std::string_view text) {
    if (text.size() % 4 != 0) return false;
    size_t padding = 0;
    while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
    constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const std::string_view digits = text.substr(0, text.size() - padding);
    if (digits.find_first_not_of(alphabet) != std::string_view::npos) return false;
    if (padding == 0) return true;
    // The bits beyond the last byte must be zero, so that equal bytes have one form.
    const size_t last = alphabet.find(digits.back());
    return padding == 1 ? last % 4 == 0 : last % 16 == 0;
}

// Decimal, no leading zeros, beyond int64 (smaller ones are written plainly, so that equal numbers have one form).
bool is_big_integer(std::string_view text) {
    const bool negative = !text.empty() && text.front() == '-';
    const std::string_view digits = negative ? text.substr(1) : text;
    if (digits.empty() || digits.size() > 100000 || digits.front() == '0') return false;
    if (digits.find_first_not_of("0123456789") != std::string_view::npos) return false;
    const std::string_view limit = negative ? "9223372036854775808" : "9223372036854775807";
    return digits.size() > limit.size() || (digits.size() == limit.size() && digits > limit);
}

void check(const Json& json, std::string_view what, const Place& place, int depth);

void check_list(const Json& json, std::string_view what, const Place& place, int depth) {
    if (!json.is(Json::Kind::array)) refuse(what, place, "expected a list");
    size_t i = 0;
    for (const Json& item : json.as_array()) check(item, what, {&place, {}, i++}, depth + 1);
}

void check_pairs(const Json& json, std::string_view what, const Place& place, int depth) {
    if (!json.is(Json::Kind::array)) refuse(what, place, "expected a list of [key, value] pairs");
    std::vector<std::string> keys;
    size_t i = 0;
    for (const Json& pair : json.as_array()) {
        const Place at{&place, {}, i++};
        if (!pair.is(Json::Kind::array) || pair.as_array().size() != 2) refuse(what, at, "expected [key, value]");
        check(pair.as_array()[0], what, {&at, {}, 0}, depth + 1);
        check(pair.as_array()[1], what, {&at, {}, 1}, depth + 1);
        keys.push_back(pair.as_array()[0].dump());
    }
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) refuse(what, place, fmt::format("the key {} occurs twice", *twice));
}

void check_tagged(const Json& json, std::string_view what, const Place& place, int depth) {
    const Json* kind = json.find("~");
    const Json* content = json.find("v");
    if (json.as_object().size() != 2 || content == nullptr || !kind->is(Json::Kind::string)) {
        refuse(what, place, "an object with a \"~\" must have exactly the members \"~\" (a string) and \"v\"");
    }
    const std::string& tag = kind->as_string();
    const Place at{&place, "v", 0, true};
    if (tag == "tuple") return check_list(*content, what, at, depth);
    if (tag == "map") return check_pairs(*content, what, at, depth);
    if (tag != "bytes" && tag != "int" && tag != "double") {
        refuse(what, place, fmt::format("unknown kind \"{}\"; use bytes, tuple, map, int or double", tag));
    }
    if (!content->is(Json::Kind::string)) refuse(what, at, "expected a string");
    const std::string& text = content->as_string();
    if (tag == "bytes" && !is_base64(text)) refuse(what, at, "expected base64 with padding (RFC 4648)");
    if (tag == "int" && !is_big_integer(text)) refuse(what, at, "expected a decimal integer beyond 64 bits");
    if (tag == "double" && text != "nan" && text != "inf" && text != "-inf") {
        refuse(what, at, "expected \"nan\", \"inf\" or \"-inf\"");
    }
}

void check(const Json& json, std::string_view what, const Place& place, int depth) {
    if (depth > max_value_depth)
        refuse(what, {}, fmt::format("it is nested more than {} levels deep", max_value_depth));
    switch (json.kind()) {
        case Json::Kind::uint64:
            refuse(what, place, "write an integer beyond 64 bits as {\"~\":\"int\",\"v\":\"<decimal>\"}");
        case Json::Kind::number:
            if (!std::isfinite(json.as_double())) refuse(what, place, "NaN and infinities must be tagged as double");
            return;
        case Json::Kind::array: return check_list(json, what, place, depth);
        case Json::Kind::object:
            if (json.find("~") != nullptr) return check_tagged(json, what, place, depth);
            for (const Json::Member& member : json.as_object()) {
                check(member.value, what, {&place, member.key, 0, true}, depth + 1);
            }
            return;
        default: return;
    }
}

}  // namespace

void check_value(const Json& json, std::string_view what) { check(json, what, {}, 0); }

Json parse_value(std::string_view text, std::string_view what) {
    Json json;
    try {
        json = Json::parse(text, what, 3 * max_value_depth + 8);  // a tag adds up to two levels
    } catch (const Error& error) {
        throw Error(Code::invalid_argument, error.what());
    }
    check_value(json, what);
    return json;
}

bool is_torch_record(std::string_view name, const Json& value) {
    constexpr const char* members[] = {"version", "paths", "names", "pickles", "dtypes"};
    return name == "rank/0/torch" && value.is(Json::Kind::object) &&
           std::all_of(std::begin(members), std::end(members),
                       [&](const char* member) { return value.find(member) != nullptr; });
}

Json double_value(double value) {
    if (std::isfinite(value)) return Json(value);
    Json tagged;
    tagged.set("~", "double");
    tagged.set("v", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
    return tagged;
}

double double_of(const Json& value, std::string_view what) {
    if (value.is(Json::Kind::number)) return value.as_double();
    if (value.is(Json::Kind::object)) {
        const Json* kind = value.find("~");
        if (kind != nullptr && kind->is(Json::Kind::string) && kind->as_string() == "double") {
            const std::string& text = value.at("v").as_string();
            if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
            const double infinity = std::numeric_limits<double>::infinity();
            return text == "inf" ? infinity : -infinity;
        }
    }
    throw Error(Code::invalid_argument, fmt::format("{} is {}, not a floating-point number", what, value.dump()));
}

int64_t int_of(const Json& value, std::string_view what) {
    if (value.is(Json::Kind::int64)) return value.as_int();
    throw Error(Code::invalid_argument, fmt::format("{} is {}, not a 64-bit integer", what, value.dump()));
}

}  // namespace tsr
