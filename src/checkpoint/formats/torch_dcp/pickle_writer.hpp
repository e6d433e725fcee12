// Writes pickles of protocol 2, which torch.load(weights_only=True) reads; only what torch.save archives and DCP's
// `.metadata` need. Each call pushes one value onto the reader's stack.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/json.hpp"

namespace tsr::pickle {

class PickleWriter {
   public:
    PickleWriter() : text_("\x80\x02") {}

    void none() { text_ += 'N'; }
    void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
    void integer(int64_t value);
    void real(double value);
    void text(std::string_view value);  // UTF-8
    void bytes(std::string_view value);
    void global(std::string_view module, std::string_view name);
    void typed(const Json& value);  // in the form of value.hpp
    void big_integer(std::string_view digits);

    void mark() { text_ += '('; }
    void tuple() { text_ += 't'; }  // of the values above the mark
    void empty_tuple() { text_ += ')'; }
    void tuple1() { text_ += '\x85'; }
    void empty_list() { text_ += ']'; }
    void appends() { text_ += 'e'; }  // to the list below the mark
    void empty_dict() { text_ += '}'; }
    void setitems() { text_ += 'u'; }
    void reduce() { text_ += 'R'; }  // callee, tuple -> object
    void new_object() { text_ += '\x81'; }
    void build() { text_ += 'b'; }  // object, state -> object
    void persistent() { text_ += 'Q'; }

    // Stores the top value; get() pushes it again.
    [[nodiscard]] uint32_t put();
    void get(uint32_t index);

    [[nodiscard]] std::string finish();

   private:
    void number(uint64_t value, int bytes);

    std::string text_;
    uint32_t stored_ = 0;
};

}  // namespace tsr::pickle
