#include "engine/config_text.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/brief.hpp"
#include "base/error.hpp"

namespace tsr {

namespace {

constexpr std::string_view blanks = " \t\n\r";
constexpr size_t shown_bytes = 40;  // of a token in a message

bool is_blank(char c) { return blanks.find(c) != std::string_view::npos; }

}  // namespace

// Checks the structure and blanks what JSON does not have. Numbers and escapes are left to the JSON parser.
class ConfigText::Scanner {
   public:
    Scanner(const ConfigText& owner, Plain& plain) : owner_(owner), text_(plain.text), keys_(plain.keys) {}

    void run() {
        value(0);
        skip_blanks();
        if (at_ < text_.size()) fail(at_, fmt::format("{} comes after the end", found()));
    }
    [[nodiscard]] const std::vector<std::string_view>& scalars() const { return scalars_; }

   private:
    [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
    [[nodiscard]] bool is_at(std::string_view what) const { return text_.compare(at_, what.size(), what) == 0; }
    [[noreturn]] void fail(size_t at, const std::string& why) const { owner_.fail(at, why); }

    // The token at which the text goes wrong, for messages.
    [[nodiscard]] std::string found() const {
        if (at_ >= text_.size()) return "the end of the text";
        const size_t end = std::min(text_.find_first_of(" \t\n\r,:]}", at_ + 1), text_.size());
        return fmt::format("'{}'", brief(readable_utf8(std::string_view(text_).substr(at_, end - at_)), shown_bytes));
    }

    void blank_until(size_t end) {
        for (; at_ < end; ++at_) text_[at_] = ' ';
    }

    void skip_blanks() {
        while (at_ < text_.size()) {
            if (is_blank(text_[at_])) {
                ++at_;
            } else if (text_[at_] == '#' || is_at("//")) {
                blank_until(std::min(text_.find('\n', at_), text_.size()));
            } else if (is_at("/*")) {
                const size_t end = text_.find("*/", at_ + 2);
                if (end == std::string::npos) fail(at_, "the comment that begins here has no end; add */");
                blank_until(end + 2);
            } else {
                return;
            }
        }
    }

    void value(int depth) {
        skip_blanks();
        if (depth == max_depth && (peek() == '{' || peek() == '[')) {
            fail(at_, fmt::format("the text is nested more than {} levels deep", max_depth));
        }
        switch (peek()) {
            case '{': return object(depth + 1);
            case '[': return array(depth + 1);
            case '"': return keep(string());
            default: return keep(word());
        }
    }

    void keep(std::string_view scalar) { scalars_.push_back(scalar); }

    void object(int depth) {
        ++at_;
        std::map<std::string_view, size_t> seen;
        skip_blanks();
        if (peek() == '}') {
            ++at_;
            return;
        }
        do {
            if (peek() != '"') fail(at_, fmt::format("expected a key in double quotes, found {}", found()));
            const size_t begin = at_;
            const std::string_view key = string();
            keep(key);
            const auto [first, is_new] = seen.emplace(key, begin);
            if (!is_new) {
                fail(begin, fmt::format("the key {} occurs twice, first in {}; remove one",
                                        brief(readable_utf8(key), shown_bytes), owner_.place_at(first->second)));
            }
            keys_.push_back(begin);
            skip_blanks();
            if (peek() != ':') fail(at_, fmt::format("expected a colon after the key, found {}", found()));
            ++at_;
            value(depth);
        } while (is_followed('}'));
    }

    void array(int depth) {
        ++at_;
        skip_blanks();
        if (peek() == ']') {
            ++at_;
            return;
        }
        do {
            value(depth);
        } while (is_followed(']'));
    }

    // Whether another member comes; steps over the comma or the closing bracket.
    [[nodiscard]] bool is_followed(char closing) {
        skip_blanks();
        const size_t comma = at_;
        if (peek() == ',') {
            ++at_;
            skip_blanks();
            if (peek() != closing) return true;
            text_[comma] = ' ';
        }
        if (peek() != closing) fail(at_, fmt::format("expected a comma or {}, found {}", closing, found()));
        ++at_;
        return false;
    }

    std::string_view string() {
        const size_t begin = at_++;
        for (; peek() != '"'; ++at_) {
            if (peek() == '\\') ++at_;
            if (at_ >= text_.size() || text_[at_] == '\n') fail(begin, "the string that begins here has no end");
        }
        ++at_;
        return std::string_view(text_).substr(begin, at_ - begin);
    }

    std::string_view word() {
        const size_t end = std::min(text_.find_first_of(" \t\n\r,:[]{}\"#/", at_), text_.size());
        const std::string_view token = std::string_view(text_).substr(at_, end - at_);
        const bool is_number = !token.empty() && (token[0] == '-' || (token[0] >= '0' && token[0] <= '9'));
        if (!is_number && token != "true" && token != "false" && token != "null") {
            fail(at_,
                 fmt::format("expected a value, found {}; values are true, false, null, numbers, strings in double "
                             "quotes, objects and arrays",
                             found()));
        }
        at_ = end;
        return token;
    }

    const ConfigText& owner_;
    std::string& text_;
    std::vector<size_t>& keys_;
    std::vector<std::string_view> scalars_;  // and keys, with their quotes
    size_t at_ = 0;
};

ConfigText::ConfigText(std::string_view text) : text_(text) {
    if (text_.size() > max_bytes) {
        throw Error(Code::invalid_argument,
                    fmt::format("the configuration has {} bytes; at most {} are allowed", text_.size(), max_bytes));
    }
    constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
    if (text_.starts_with(byte_order_mark)) text_.replace(0, byte_order_mark.size(), byte_order_mark.size(), ' ');
    Plain plain{text_, {}};
    Scanner scanner(*this, plain);
    scanner.run();
    parse(plain, scanner.scalars());
    if (!root_.is(Json::Kind::object)) fail(0, "a configuration is an object: {\"train_batch_size\": 8, ...}");
    size_t next = 0;
    find_places(root_, plain.keys, next);
}

void ConfigText::parse(const Plain& plain, const std::vector<std::string_view>& scalars) {
    try {
        root_ = Json::parse(plain.text, "the configuration");
    } catch (const Error& error) {
        if (error.code() != Code::corrupt) throw;
        for (const std::string_view scalar : scalars) {  // the parser does not say where
            try {
                (void)Json::parse(scalar, "this");
            } catch (const Error& why) {
                fail(static_cast<size_t>(scalar.data() - plain.text.data()),
                     fmt::format("{}: {}", brief(readable_utf8(scalar), shown_bytes), why.what()));
            }
        }
        throw Error(Code::invalid_argument, error.what());
    }
}

void ConfigText::find_places(const Json& value, const std::vector<size_t>& keys, size_t& next) {
    if (value.is(Json::Kind::object)) {
        for (const Json::Member& member : value.as_object()) {
            places_.emplace(&member.value, keys[next++]);
            find_places(member.value, keys, next);
        }
    } else if (value.is(Json::Kind::array)) {
        for (const Json& item : value.as_array()) find_places(item, keys, next);
    }
}

std::string ConfigText::place_at(size_t at) const {
    const std::string_view before = std::string_view(text_).substr(0, at);
    const auto line = 1 + std::ranges::count(before, '\n');
    const size_t last = before.rfind('\n');
    const std::string_view in_line = last == std::string_view::npos ? before : before.substr(last + 1);
    const auto is_character = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; };
    return fmt::format("line {}, column {}", line, 1 + std::ranges::count_if(in_line, is_character));
}

std::string ConfigText::place_of(const Json& value) const { return place_at(places_.at(&value)); }

void ConfigText::fail(size_t at, const std::string& why) const {
    throw Error(Code::invalid_argument, fmt::format("the configuration, {}: {}", place_at(at), why));
}

}  // namespace tsr
