#include "base/json.hpp"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr std::string_view kind_names[] = {"null",     "a boolean", "an integer", "an integer",
                                           "a number", "a string",  "an array",   "an object"};

[[noreturn]] void throw_kind(std::string_view expected, Json::Kind found) {
    throw Error(Code::corrupt, fmt::format("expected {}, found {}", expected, kind_names[static_cast<size_t>(found)]));
}

[[noreturn]] void throw_parse(std::string_view what, std::string_view why) {
    throw Error(Code::corrupt, fmt::format("{} is not valid JSON: {}", what, why));
}

// Few keys are compared with each other, and keys in order with their neighbours; else sorting finds duplicates in
// n log n: a header may hold a million names.
void refuse_duplicates(const Json::Object& members, std::string_view what) {
    constexpr size_t few = 8;
    const auto same = [](const Json::Member& a, const Json::Member& b) { return a.key == b.key; };
    if (members.size() <= few) {
        for (auto a = members.begin(); a != members.end(); ++a) {
            if (std::any_of(members.begin(), a, [&](const Json::Member& b) { return same(*a, b); })) {
                throw_parse(what, fmt::format("the key \"{}\" occurs twice", a->key));
            }
        }
        return;
    }
    const auto not_above = [](const Json::Member& a, const Json::Member& b) { return a.key >= b.key; };
    if (std::adjacent_find(members.begin(), members.end(), not_above) == members.end()) return;
    std::vector<std::string_view> keys;
    keys.reserve(members.size());
    for (const Json::Member& member : members) keys.push_back(member.key);
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) throw_parse(what, fmt::format("the key \"{}\" occurs twice", *twice));
}

Json convert(simdjson::dom::element element, std::string_view what, int depth_left) {
    using simdjson::dom::element_type;
    if (depth_left < 0) throw_parse(what, "it is nested too deep");
    switch (element.type()) {
        case element_type::NULL_VALUE: return {};
        case element_type::BOOL: return Json(element.get_bool().value_unsafe());
        case element_type::INT64: return Json(int64_t{element.get_int64().value_unsafe()});
        case element_type::UINT64: return Json(uint64_t{element.get_uint64().value_unsafe()});
        case element_type::DOUBLE: return Json(element.get_double().value_unsafe());
        case element_type::STRING: return Json(element.get_string().value_unsafe());
        case element_type::ARRAY: {
            const simdjson::dom::array items = element.get_array().value_unsafe();
            Json::Array array;
            array.reserve(items.size());
            for (const auto item : items) array.push_back(convert(item, what, depth_left - 1));
            return Json(std::move(array));
        }
        case element_type::OBJECT: {
            const simdjson::dom::object fields = element.get_object().value_unsafe();
            Json::Object members;
            members.reserve(fields.size());
            for (const auto field : fields) {
                members.push_back({std::string(field.key), convert(field.value, what, depth_left - 1)});
            }
            if (members.size() > 1) refuse_duplicates(members, what);
            return Json(std::move(members));
        }
    }
    throw_parse(what, "unknown element");
}

}  // namespace

Json::Json(uint64_t value) {
    if (value <= static_cast<uint64_t>(INT64_MAX)) {
        value_ = static_cast<int64_t>(value);
    } else {
        value_ = value;
    }
}

Json::Json(Object value) : value_(std::move(value)) {}

Json Json::parse(std::string_view text, std::string_view what, int max_depth) {
    simdjson::dom::parser parser;
    const simdjson::padded_string padded(text);
    // simdjson counts the scalars' level too; ours is checked exactly in convert().
    if (const auto error = parser.allocate(padded.size() + 1, static_cast<size_t>(max_depth) + 2)) {
        throw_parse(what, simdjson::error_message(error));
    }
    simdjson::dom::element root;
    if (const auto error = parser.parse(padded).get(root)) throw_parse(what, simdjson::error_message(error));
    return convert(root, what, max_depth);
}

std::string Json::dump() const {
    std::string out;
    dump_to(out);
    return out;
}

void Json::dump_to(std::string& out) const {
    switch (kind()) {
        case Kind::null: out += "null"; return;
        case Kind::boolean: out += std::get<bool>(value_) ? "true" : "false"; return;
        case Kind::int64: out += std::to_string(std::get<int64_t>(value_)); return;
        case Kind::uint64: out += std::to_string(std::get<uint64_t>(value_)); return;
        case Kind::number: append_json_double(out, std::get<double>(value_)); return;
        case Kind::string: append_json_string(out, std::get<std::string>(value_)); return;
        case Kind::array: {
            out += '[';
            bool first = true;
            for (const Json& item : std::get<Array>(value_)) {
                if (!first) out += ',';
                first = false;
                item.dump_to(out);
            }
            out += ']';
            return;
        }
        case Kind::object: {
            out += '{';
            bool first = true;
            for (const Member& member : std::get<Object>(value_)) {
                if (!first) out += ',';
                first = false;
                append_json_string(out, member.key);
                out += ':';
                member.value.dump_to(out);
            }
            out += '}';
            return;
        }
    }
}

bool Json::as_bool() const {
    if (!is(Kind::boolean)) throw_kind("a boolean", kind());
    return std::get<bool>(value_);
}

int64_t Json::as_int() const {
    if (!is(Kind::int64)) throw_kind("an integer below 2^63", kind());
    return std::get<int64_t>(value_);
}

double Json::as_double() const {
    if (is(Kind::int64)) return static_cast<double>(std::get<int64_t>(value_));
    if (is(Kind::uint64)) return static_cast<double>(std::get<uint64_t>(value_));
    if (!is(Kind::number)) throw_kind("a number", kind());
    return std::get<double>(value_);
}

const std::string& Json::as_string() const {
    if (!is(Kind::string)) throw_kind("a string", kind());
    return std::get<std::string>(value_);
}

const Json::Array& Json::as_array() const {
    if (!is(Kind::array)) throw_kind("an array", kind());
    return std::get<Array>(value_);
}

const Json::Object& Json::as_object() const {
    if (!is(Kind::object)) throw_kind("an object", kind());
    return std::get<Object>(value_);
}

const Json* Json::find(std::string_view key) const {
    for (const Member& member : as_object()) {
        if (member.key == key) return &member.value;
    }
    return nullptr;
}

const Json& Json::at(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) throw Error(Code::corrupt, fmt::format("the key \"{}\" is missing", key));
    return *value;
}

void Json::set(std::string_view key, Json value) {
    if (is(Kind::null)) value_ = Object{};
    std::get<Object>(value_).push_back({std::string(key), std::move(value)});
}

bool operator==(const Json& a, const Json& b) { return a.value_ == b.value_; }

bool is_utf8(std::string_view text) { return simdjson::validate_utf8(text.data(), text.size()); }

void append_json_string(std::string& out, std::string_view text) {
    if (!is_utf8(text)) throw Error(Code::invalid_argument, "a text that is not UTF-8 cannot be written as JSON");
    out += '"';
    // Runs of plain characters are copied at once: headers hold a million names.
    size_t plain = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 0x20) continue;
        out.append(text, plain, i - plain);
        plain = i + 1;
        switch (c) {
            case '"': out += "\\\""; break;
            case '\\': out += "\\\\"; break;
            case '\n': out += "\\n"; break;
            case '\r': out += "\\r"; break;
            case '\t': out += "\\t"; break;
            default: out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        }
    }
    out.append(text, plain);
    out += '"';
}

void append_json_double(std::string& out, double value) {
    if (!std::isfinite(value)) throw Error(Code::invalid_argument, "JSON has no NaN and no infinities");
    char digits[40];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    const std::string_view text(digits, static_cast<size_t>(end - digits));
    out += text;
    if (text.find_first_of(".e") == std::string_view::npos) out += ".0";
}

}  // namespace tsr
