// Where the output of a rank goes besides the rank's pipes: torchrun's --redirects, --tee, --local-ranks-filter,
// --duplicate-...-filters and --log-line-prefix-template. Plain values and pure functions; log_mux.hpp moves the bytes.
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tsr {

enum class Stream { out, err };
inline constexpr std::array<Stream, 2> both_streams{Stream::out, Stream::err};

// Streams chosen for each local rank.
class StreamChoice {
   public:
    // "3", for all ranks, or "0:1,12:3", for these local ranks: 0 none, 1 standard output, 2 standard error, 3 both.
    // Throws INVALID_ARGUMENT.
    [[nodiscard]] static StreamChoice parse(std::string_view text);
    [[nodiscard]] bool includes(int local_rank, Stream stream) const;
    [[nodiscard]] bool any() const;  // whether it names a stream of any rank
    [[nodiscard]] int greatest_rank() const { return of_ranks_.empty() ? -1 : of_ranks_.rbegin()->first; }

   private:
    int of_all_ = 0;
    std::map<int, int> of_ranks_;
};

struct OutputOptions {
    bool prefix = true;
    std::string prefix_template;  // empty: "[rank N program] "
    StreamChoice redirects;       // to a file, and not to the launcher's output
    StreamChoice tee;             // to a file as well
    std::vector<int> shown;       // local ranks; empty: all
    // The path of a file for both streams of a rank, which are then not printed, with names as in a prefix; empty: none.
    std::string file_template;
    // Lines that contain one of these texts also go to a file.
    std::vector<std::string> out_filters;
    std::vector<std::string> err_filters;

    [[nodiscard]] bool has_file(int local_rank, Stream stream) const;
    [[nodiscard]] bool shows(int local_rank, Stream stream) const;
    // Whether the job needs a directory for files.
    [[nodiscard]] bool writes_files() const;
    // Throws INVALID_ARGUMENT if an option names a local rank that a host with `ranks` ranks does not have.
    void check(int ranks) const;
};

struct RankNames {
    int rank = 0;
    int local_rank = 0;
    std::string role;
    std::string host;
};

// Replaces ${rank}, ${local_rank}, ${role_name} and ${hostname}; other text stays, also other names.
[[nodiscard]] std::string expand_prefix(std::string_view text, const RankNames& names);

// "a,b,,c": {"a", "b,c"}, because two commas stand for one. An empty text is an empty list.
[[nodiscard]] std::vector<std::string> comma_separated(std::string_view text);

}  // namespace tsr
