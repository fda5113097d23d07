// Text tables: columns as wide as their widest cell, numbers to the right.
#ifndef CERTKV_CLIENTS_CLI_TABLE_H_
#define CERTKV_CLIENTS_CLI_TABLE_H_

#include <string>
#include <vector>

namespace certkv::cli {

class Table {
 public:
  enum class Align : uint8_t { kLeft, kRight };

  // A title may have several lines, separated by '\n'.
  void AddColumn(std::string title, Align align = Align::kRight);
  // As many cells as columns.
  void AddRow(std::vector<std::string> cells);
  // Lines end with '\n'; a rule of box characters lies under the titles.
  std::string Render() const;

 private:
  std::vector<std::string> titles_;
  std::vector<Align> aligns_;
  std::vector<std::vector<std::string>> rows_;
};

// "1,743", "1.2 MiB", "0.00271", "12.4 us".
std::string FormatCount(int64_t count);
std::string FormatBytes(int64_t bytes);
std::string FormatBound(double bound);  // 3 significant digits; "inf", "0"
std::string FormatNanoseconds(double nanoseconds);
std::string FormatPercent(double share);  // "99.7 %"
std::string FormatAge(int64_t milliseconds);

// A bar of eighth blocks, `width` characters wide at share 1.
std::string Bar(double share, int width);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_TABLE_H_
