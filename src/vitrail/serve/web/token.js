// The dialog that requests the server's token, on both pages.

const $ = (id) => document.getElementById(id);

export function askToken(wrong) {
  return new Promise((resolve) => {
    $("token-note").textContent = wrong ? "The token was rejected; try another." : "It is stored until this tab is closed.";
    $("token-box").oncancel = (event) => event.preventDefault();
    $("token-form").onsubmit = (event) => { event.preventDefault(); $("token-box").close(); resolve($("token").value); };
    $("token-box").showModal();
  });
}
