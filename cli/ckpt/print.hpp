// Output of `tessera ckpt`: sizes, times, tables and JSON, the same in all sub-commands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"
#include "checkpoint/load/checkpoint.hpp"
#include "printable.hpp"

namespace tsr::cli {

[[nodiscard]] std::string size_text(int64_t bytes);                    // "3.4 MiB"
[[nodiscard]] std::string count_text(size_t n, std::string_view one);  // "1 file", "2 files"
[[nodiscard]] std::string time_text(const std::string& committed);     // a manifest's time, in seconds: "... UTC"
[[nodiscard]] std::string metric_text(const Json& value);
[[nodiscard]] size_t width_of(std::string_view text);  // columns of UTF-8 on a terminal

// The rank that wrote a file, by its name: "rank-00003.safetensors", PyTorch's "__3_0.distcp" or
// "shard-00004-model-..."; -1 for other names.
[[nodiscard]] int rank_of_file(const std::string& name);

[[nodiscard]] std::string value_text(const Json& value);  // typed JSON in readable form, printable and shortened

[[nodiscard]] Values shown_values(const Manifest& manifest);  // without Tessera's own
[[nodiscard]] Json values_json(const Values& values);
[[nodiscard]] Json unreadable_json(const std::map<std::string, std::string, std::less<>>& unreadable);
// Reports on standard error the entries left out because they cannot be read. Returns the command's exit code.
[[nodiscard]] int tell_unreadable(const std::map<std::string, std::string, std::less<>>& unreadable);
[[nodiscard]] Json summary_json(const Checkpoint& checkpoint);  // the members that all sub-commands print

void print_json(const Json& json);
void complain(std::string_view message);  // "tessera ckpt: message" on standard error

// The text of a JSON object, written member by member, for documents too large to build in memory.
class ObjectText {
   public:
    explicit ObjectText(const Json& first_members);
    void member(std::string_view key, const Json& value);
    void member(std::string_view key, std::string_view text);
    void member(std::string_view key, const std::string& text) { member(key, std::string_view(text)); }
    void member(std::string_view key, int64_t number);
    void member(std::string_view key, const Dims& numbers);
    // Begins an object or list as a member, or an object in a list; what follows belongs to it until end().
    void begin(std::string_view key) { open(key, '{'); }
    void begin_list(std::string_view key) { open(key, '['); }
    void begin_item();
    void end();
    // Takes out the text so far, to be printed before more is added; finish() returns the rest.
    [[nodiscard]] std::string take();
    [[nodiscard]] std::string finish();  // with a newline

   private:
    void comma();
    void add(std::string_view key);
    void open(std::string_view key, char bracket);

    std::string text_;
    std::string open_;  // the brackets that are not closed yet, outermost first
};

// Columns under a heading.
class Table {
   public:
    enum class Align { left, right };
    void column(std::string heading, Align align);
    void row(std::vector<std::string> cells);
    void print() const;

   private:
    void print_row(const std::vector<std::string>& cells, const std::vector<size_t>& widths) const;

    std::vector<std::string> headings_;
    std::vector<Align> aligns_;
    std::vector<std::vector<std::string>> rows_;
};

}  // namespace tsr::cli
